"""The schema of configs/*.yaml. Resolved once, validated, frozen; modules receive values.

Every field is documented here and nowhere else: docs render from this file. Unknown keys are
refused with the nearest key. Nothing in the project reads the environment but `load` (for
`XDG_RUNTIME_DIR`) and the launchers in scripts/.
"""

import difflib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol.errors import ConfigError
from protocol.faults import ACTIONS, POINTS

NAME = r"^[a-z0-9][a-z0-9._-]{0,47}$"

ON_CPU = ("cpu", "cpu-async")
"""Devices that compute on the machine's cores."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelConfig(Section):
    """One served model."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "decoder_lm"
    """The module in worker/models that builds it: `decoder_lm` or `reference`."""
    source: str = ""
    """Where the weights are: a `.gguf` file, a Hugging Face folder, or `package:NAME/GLOB`, a file
    inside an installed Python package (the embedded default uses this)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    context: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    """Most tokens of prompt and output together; default: what the model was trained for."""
    pages: Annotated[int, Field(ge=2)] | None = None
    """KV pages of 16 tokens; default: what `kv_memory_mib` holds."""
    kv_memory_mib: Annotated[int, Field(ge=1)] | None = None
    """Memory for KV pages; default: 1024 on a CPU, most of what is free on a GPU."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the model's builder as they are."""


class WorkerConfig(Section):
    """One worker process."""

    name: Annotated[str, Field(pattern=NAME)]
    """In logs, statistics and errors; no two workers share one."""
    device: Annotated[str, Field(pattern=r"^(cpu|cpu-async|cuda(:\d+)?)$")] = "cpu"
    """`cpu`, `cuda` or `cuda:N`. `cpu-async` is for tests: a CPU that is as asynchronous as a GPU,
    where what is read too early or written too soon shows; it is slow."""
    """`cpu`, or `cuda:N` for the GPU with that number."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Intra-op threads; default: the machine's cores divided by the CPU workers."""
    models: tuple[str, ...] | None = None
    """Names from `models`; default: all of them."""
    depth: Annotated[int, Field(ge=1, le=4)] = 2
    """Engine steps in flight; stops are learnt this many steps late at most."""
    hang_ms: Annotated[int, Field(ge=100)] | None = None
    """A step that lasts longer than this, and than five times what its tokens should cost, counts
    as hung: the worker is killed and replaced. Default: 30,000 on a CPU, whose cores other work may
    take, `supervision.silence_ms` on a GPU."""


class GatewayConfig(Section):
    """The HTTP gateway process."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 picks a free port; `podium stats` and the log say which."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """A larger request body is refused with 413."""


class LimitsConfig(Section):
    """Admission: queues are bounded by requests and by tokens."""

    max_queued: Annotated[int, Field(ge=1)] = 4096
    """Requests that wait for a place; more are refused with 429."""
    max_queued_tokens: Annotated[int, Field(ge=1)] = 8_000_000
    """Prompt tokens of requests that wait; more are refused with 429."""
    max_tokens: Annotated[int, Field(ge=1)] = 1 << 20
    """Upper bound on one request's `max_tokens`."""
    default_deadline_ms: Annotated[int, Field(ge=0)] = 0
    """For requests that name none; 0 is no deadline."""
    prefill_tokens: Annotated[int, Field(ge=16)] = 2048
    """Most prompt tokens in one prefill batch; a longer prompt is prefilled in chunks."""
    max_rows: Annotated[int, Field(ge=1)] = 256
    """Most rows in one standing batch."""
    overcommit: Annotated[float, Field(ge=1.0, le=64.0)] = 1.0
    """KV pages that may be promised of each pool, as a multiple of it. A request is promised room
    for its prompt and all of its `max_tokens`; at 1 no stream ever waits for memory once it runs.
    Above 1 more requests run at once, and a worker whose pool runs out holds the youngest, or has
    them computed again later (docs/operations.md)."""


class SupervisionConfig(Section):
    """How children are watched and restarted."""

    beat_ms: Annotated[int, Field(ge=20, le=10_000)] = 200
    """How often processes say that they live."""
    silence_ms: Annotated[int, Field(ge=100)] = 2000
    """A worker that says nothing for this long is killed and replaced; `workers.N.hang_ms` is for
    one that speaks and does not work."""
    backoff_ms: Annotated[int, Field(ge=1)] = 250
    """First restart delay; doubles up to `backoff_max_ms`."""
    backoff_max_ms: Annotated[int, Field(ge=1)] = 10_000
    """Longest restart delay."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts within `restart_window_s`; more and the daemon exits, naming the cause."""
    restart_window_s: Annotated[int, Field(ge=1)] = 300
    """How long a restart counts against `max_restarts`."""
    start_timeout_s: Annotated[int, Field(ge=1)] = 600
    """A child that is not ready by then is killed and restarted."""
    drain_s: Annotated[int, Field(ge=0)] = 30
    """After SIGTERM, running streams may finish within this time."""


class LogConfig(Section):
    """What is logged, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is told."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for collectors: one object a line."""


class FaultConfig(Section):
    """A planted fault. For tests: it makes a process misbehave on purpose."""

    point: str
    """Where: a name in `protocol.faults.POINTS`."""
    action: str = "raise"
    """What: a name in `protocol.faults.ACTIONS`."""
    where: str = ""
    """In which process: a worker's name, `gateway` or `conductor`; default: every one."""
    after: Annotated[int, Field(ge=0)] = 0
    """It lets the first so many passes go by. A point inside a step is passed once a step."""
    every: Annotated[int, Field(ge=1)] = 1
    """From then on it fires at each so-manieth pass."""
    times: Annotated[int, Field(ge=0)] = 0
    """How often it fires in one process; 0: no bound."""
    ms: Annotated[int, Field(ge=0)] = 100
    """How long `slow` sleeps."""
    once_file: str = ""
    """A path; it fires only if it can create that file, so once over all processes."""
    when_file: str = ""
    """A path; it fires only if it can remove that file, so once each time somebody creates it."""

    @field_validator("point")
    @classmethod
    def _known_point(cls, v: str) -> str:
        if v not in POINTS:
            raise ValueError(f"no fault point {v!r}{_nearest(v, list(POINTS))}")
        return v

    @field_validator("action")
    @classmethod
    def _known_action(cls, v: str) -> str:
        if v not in ACTIONS:
            raise ValueError(f"no action {v!r}{_nearest(v, list(ACTIONS))}")
        return v


class DaemonConfig(Section):
    """A whole deployment: the root of configs/*.yaml."""

    name: Annotated[str, Field(pattern=NAME)] = "podium"
    """Tells deployments of one host apart: it names the default runtime directory."""
    runtime_dir: str | None = None
    """Sockets, lock and resolved configuration; default: `$XDG_RUNTIME_DIR/podium/<name>`, else
    `<tmp>/podium-<uid>/<name>`. Made with mode 0700."""
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]
    """Served models, by the name that requests give."""
    workers: Literal["auto"] | tuple[WorkerConfig, ...] = "auto"
    """`auto`: one worker per visible GPU, or one CPU worker with all cores."""
    gateway: GatewayConfig | None = GatewayConfig()
    """`null`: no HTTP; clients speak ZeroMQ."""
    limits: LimitsConfig = LimitsConfig()
    """What is admitted, and how large batches become."""
    supervision: SupervisionConfig = SupervisionConfig()
    """How children are watched, restarted and drained."""
    log: LogConfig = LogConfig()
    """What is logged, and how."""
    faults: tuple[FaultConfig, ...] = ()
    """For tests: where processes are to misbehave, and how."""

    @field_validator("models")
    @classmethod
    def _model_names(cls, v: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
        for name in v:
            if not name or "/" in name or len(name) > 200:
                raise ValueError(f"model name {name!r}: 1 to 200 characters without '/'")
        return v

    @model_validator(mode="after")
    def _placement(self) -> "DaemonConfig":
        if self.workers == "auto":
            return self
        if not self.workers:
            raise ValueError("workers: at least one is needed, or 'auto'")
        names = [w.name for w in self.workers]
        if len(set(names)) != len(names):
            raise ValueError(f"workers: names must differ, got {names}")
        placed: set[str] = set()
        for w in self.workers:
            for m in w.models if w.models is not None else tuple(self.models):
                if m not in self.models:
                    raise ValueError(
                        f"workers.{w.name}.models: no model {m!r}{_nearest(m, list(self.models))}"
                    )
                placed.add(m)
        missing = sorted(set(self.models) - placed)
        if missing:
            raise ValueError(f"no worker serves model {missing[0]!r}: add it to a worker's models")
        return self


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """Keys allowed at the section that holds `loc`, by walking the schema."""
    cls: type[Section] | None = DaemonConfig
    tables = {
        "models": ModelConfig, "workers": WorkerConfig, "gateway": GatewayConfig,
        "limits": LimitsConfig, "supervision": SupervisionConfig, "log": LogConfig,
        "faults": FaultConfig,
    }  # fmt: skip
    if len(loc) > 1:
        cls = tables.get(str(loc[0]))
    return list(cls.model_fields) if cls else []


def _explain(e: ValidationError, where: str) -> ConfigError:
    lines: list[str] = []
    for err in e.errors(include_url=False):
        loc = tuple(x for x in err["loc"] if not (isinstance(x, str) and "[" in x))
        if loc and loc[0] == "workers" and err["type"] == "literal_error":
            continue  # the other half of the 'auto' union
        path = ".".join(map(str, loc)) or "(root)"
        if err["type"] == "extra_forbidden":
            key = str(loc[-1])
            lines.append(f"{path}: unknown key{_nearest(key, _known_keys(loc))}")
        else:
            text = err["msg"].removeprefix("Value error, ")
            got = err.get("input")
            shown = f" (got {got!r})" if isinstance(got, str | int | float | bool) else ""
            lines.append(f"{path}: {text}{shown}")
    if not lines:
        lines = ["workers: 'auto' or a list of workers is expected"]
    return ConfigError(f"{where}: " + "; ".join(lines), path=where, problems=lines)


def parse(data: Any, where: str = "configuration") -> DaemonConfig:
    """Validate a mapping; raises `ConfigError` with path, reason and nearest key."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a mapping is expected at the top, got {type(data).__name__}")
    try:
        return DaemonConfig.model_validate(data)
    except ValidationError as e:
        raise _explain(e, where) from None


def load(path: str | Path) -> DaemonConfig:
    """Read a YAML (or JSON) file. Raises `ConfigError`; the file is not modified."""
    p = Path(path)
    try:
        text = p.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{p}: cannot read the configuration: {reason}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"{p}: not valid YAML: {' '.join(str(e).split())}") from None
    return parse(data, str(p))


def runtime_dir(config: DaemonConfig) -> Path:
    """Where this deployment's sockets live (not created here)."""
    if config.runtime_dir:
        return Path(config.runtime_dir).expanduser().absolute()
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "podium" / config.name
    return Path(tempfile.gettempdir()) / f"podium-{os.getuid()}" / config.name
