"""What can be known of a model before anything is started: its folder and its context length."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        path: folder, or name on a model hub, as SGLang takes it.
        context: positions that the model was made for; None where only the hub knows.
    """

    path: str
    context: int | None = None


def find(path: str) -> Model:
    """The model at `path`; CheckpointError if it is a folder that cannot be served, or nothing at all."""
    folder = Path(path).expanduser()
    if not folder.exists():
        if _HUB_NAME.fullmatch(path):
            return Model(path)
        raise CheckpointError(f"there is no model at {path}: name a folder with a config.json, or a model of a hub")
    if not folder.is_dir():
        raise CheckpointError(f"{path} is a file: name the folder that holds the model's config.json")
    config = _read_config(folder)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise CheckpointError(f"{path} holds no weights ({', '.join(_WEIGHTS)}): the download may be incomplete")
    text_config = config.get("text_config", config)
    context = text_config.get("max_position_embeddings") if isinstance(text_config, dict) else None
    return Model(str(folder), context if isinstance(context, int) else None)


def _read_config(folder: Path) -> dict:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a model in Hugging Face's layout")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise CheckpointError(f"{file} names no architectures: it does not describe a model that can be served")
    return config
