"""A Hugging Face folder (config.json and safetensors) as a `Checkpoint`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import ConfigError
from worker.models.weights.checkpoint import interleave
from worker.models.weights.hf_config import read_config, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16", "F64")
_Q, _K = ".self_attn.q_proj.weight", ".self_attn.k_proj.weight"


class HfCheckpoint:
    """Opens a folder's files and reads their headers; see `Checkpoint`.

    Only safetensors are read, never a pickle. Raises `ConfigError`: a file that is missing, corrupt
    or truncated, an index that disagrees with its shards, another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path)
        self._file_of: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file, names in self._files().items():
            self._open(file, names, shapes)
        if self.config.tied:  # some writers store the shared tensor twice
            shapes.pop("lm_head.weight", None)
        for name in [n for n in shapes if n.endswith(".rotary_emb.inv_freq")]:
            del shapes[name]  # a table that old writers saved; it is computed here
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def read_into(self, name: str, out: torch.Tensor) -> None:
        w = self._file_of[name].get_tensor(name)
        if name.endswith(_Q):
            w = interleave(w, self.config.heads)
        elif name.endswith(_K):
            w = interleave(w, self.config.kv_heads)
        out.copy_(w)

    def _files(self) -> dict[Path, set[str] | None]:
        """File → the names that the index expects in it; None where there is no index."""
        index = self.path / _INDEX
        if not index.exists():
            single = self.path / _SINGLE
            if single.exists():
                return {single: None}
            raise ConfigError(
                f"{self.path}: neither {_SINGLE} nor {_INDEX} is there; weights are read from "
                "safetensors only (convert other formats with save_pretrained of transformers)"
            )
        found: dict[Path, set[str] | None] = {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: 'weight_map' must be an object that names the shards")
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{index}: shard {file!r} of {name} is not a plain file name")
            shards.setdefault(file, set()).add(name)
        for file, names in shards.items():
            found[self.path / file] = names
        return found

    def _open(
        self, file: Path, expected: set[str] | None, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        try:
            opened = safe_open(file, framework="pt", device="cpu")
            names = set(opened.keys())
            if expected is not None and names != expected:
                odd = sorted(names ^ expected)
                raise ConfigError(
                    f"{file}: {len(odd)} tensors are in the shard or in {_INDEX} but not in both: "
                    f"{', '.join(odd[:4])}; fetch the folder again"
                )
            for name in sorted(names):
                header = opened.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise ConfigError(
                        f"{file}: tensor {name} is {header.get_dtype()}; "
                        f"read are {', '.join(_DTYPES)}"
                    )
                shapes[name] = tuple(header.get_shape())
                self._file_of[name] = opened
        except FileNotFoundError:
            raise ConfigError(f"{file}: the shard that {_INDEX} names is missing") from None
        except (SafetensorError, OSError) as e:
            raise ConfigError(
                f"{file}: a corrupt or truncated safetensors file: {e}; fetch it again"
            ) from None
