"""A GGUF file written again with some of its values or tensors changed: models for benches that no package ships.

Read next: clients.py and strain.py, which make theirs with it.
"""

from collections.abc import Mapping

import gguf
import numpy as np


def write_copy(
    path: str,
    source: gguf.GGUFReader,
    values: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    words: gguf.GGUFReader | None = None,
) -> str:
    """The file `source` at `path`, with other values and tensors, and the tokenizer of `words` if that is given."""
    writer = gguf.GGUFWriter(path, source.fields["general.architecture"].contents())
    own = {key: field for key, field in source.fields.items() if not (words and key.startswith("tokenizer."))}
    theirs = {key: field for key, field in words.fields.items() if key.startswith("tokenizer.")} if words else {}
    for key, field in (own | theirs).items():
        if not key.startswith("GGUF.") and key != "general.architecture":  # the writer has these
            kind, *inner = field.types
            value = values.get(key, field.contents())
            writer.add_key_value(key, value, kind, sub_type=inner[0] if inner else None)
    for tensor in source.tensors:
        data = tensors.get(tensor.name, tensor.data)
        raw = None if data.dtype in (np.float32, np.float16) else tensor.tensor_type
        writer.add_tensor(tensor.name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
