"""A vocabulary of a few hundred tokens, and GGUF files that hold a tokenizer alone."""

import gguf

from tokenizer import BYTE_OF, CONTROL, USER_DEFINED

ALPHABET = sorted(BYTE_OF, key=BYTE_OF.get)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "e Ģ"]
WORDS = ["he", "ll", "hell", "hello", "Ġhello", "eĢ"]
MARKS = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<think>"]
TOKENS = ALPHABET + WORDS + MARKS + TAGS
TYPES = [1] * (256 + len(WORDS)) + [CONTROL] * len(MARKS) + [USER_DEFINED] * len(TAGS)
IM_START, IM_END, THINK = (TOKENS.index(token) for token in MARKS + TAGS)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(
    path, *, pre="gpt-2", model="gpt2", tokens=TOKENS, types=TYPES, merges=MERGES, template=CHATML, **extra
):
    """A GGUF file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if model != "none":
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in ({"eos_token_id": IM_END} | extra).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
