"""Model files of the fixtures: loaded, run, or refused with one line."""

from pathlib import Path

import numpy as np

from cells import EXACT
from given_kernels import CPU
from kvcache import Cache
from model import Model
from modelconfig import ModelError
from modelweights import load_model

DATA = Path(__file__).parent / "data" / "model"
MODELS = sorted(path.stem for path in DATA.glob("*.npz"))


def fixture(name: str) -> Path:
    return DATA / f"{name}.gguf"


def load(path, log=lambda line: None):
    return load_model(path, CPU, log)


def run(file, ids) -> np.ndarray:
    """Logits of a few tokens, and a draft where there is a draft layer: what loads must also run."""
    model = Model(file.config, file.weights, CPU)
    cache = Cache(file.config.cache_shape(64, EXACT), CPU)
    residual = model.append(cache, np.asarray(ids, np.int32)).residual
    if file.config.n_draft:
        model.draft(cache, residual[:3], np.asarray(ids[1:4], np.int32), 0)
    return model.logits(residual)


def loaded_or_refused(path, log=lambda line: None):
    """The loaded file, or the message with which it is refused: one line that starts with its path."""
    try:
        return load(path, log)
    except ModelError as error:
        message = str(error)
    assert message.startswith(str(path).split("-0000", maxsplit=1)[0])
    assert "\n" not in message
    assert len(message) < 400
    return message
