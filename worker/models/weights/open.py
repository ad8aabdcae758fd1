"""Path → opened checkpoint, by what lies there."""

from pathlib import Path

from protocol.errors import ConfigError
from worker.models.weights.checkpoint import Checkpoint
from worker.models.weights.gguf_checkpoint import GgufCheckpoint
from worker.models.weights.hf_checkpoint import HfCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """A `.gguf` file or a Hugging Face folder. Raises `ConfigError`; reads headers only."""
    if path.is_dir():
        return HfCheckpoint(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ConfigError(f"{path}: name the folder that holds it and its config.json")
        return GgufCheckpoint(path)
    raise ConfigError(f"{path}: no such file or folder; a .gguf file or a Hugging Face folder")
