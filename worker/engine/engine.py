"""Engine: the device, its models, and the one path of a step (docs/architecture.md).

Thread: everything runs on the GPU thread but `check_stop_for_batch` and `finalize_batch`
(postprocess thread), and `statistics` (any). The order of a step is fixed (E23): prepare, then
launch → commit → `commit_done` → collect → postprocess → `completion_event` → `outputs_ready`.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from protocol.clock import Clock, SystemClock
from protocol.errors import Bug
from protocol.graph import ModelSpec
from worker.api.model import LoadedModel
from worker.api.outputs import StepOutputs
from worker.api.states import LazyRequestStates
from worker.device.base import Device
from worker.engine import tail
from worker.engine.eager_step import EagerStep
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.loading import NodeResources, build_resources, clean_up, local_specs
from worker.engine.requests import Requests, attempt
from worker.engine.step_runner import StepRunner
from worker.engine.submodule_management import SubmoduleManagement
from worker.engine.tail import HostOutputs
from worker.engine.timings import StepHistograms
from worker.engine.warmup import warm_up
from worker.resources.base import Resource
from worker.resources.kv.paged import PagedKv

CPU_KV_BYTES = 1 << 30
GPU_KV_SHARE = 0.8
"""Of what is free once the weights are there: the rest is for activations."""


class Engine:
    def __init__(
        self,
        device: Device,
        dtype_default: torch.dtype | None = None,
        clock: Clock | None = None,
    ) -> None:
        on_cpu = device.torch_device.type == "cpu"
        self.device = device
        self.dtype_default = dtype_default or (torch.float32 if on_cpu else torch.bfloat16)
        self.clock = clock or SystemClock()
        self.models: dict[str, LoadedModel] = {}
        self.resources: dict[str, dict[str, Resource]] = {}
        self.histograms = StepHistograms()
        self._nodes: dict[str, SubmoduleManagement] = {}
        self._runner = StepRunner()
        self._requests = Requests(device, self._runner)
        self._steps = EagerStep(device, self._runner, self.clock)
        self._counts = {"steps": 0, "failed_steps": 0, "refused_steps": 0, "failed_requests": 0}

    # ---- loading

    def load_model(
        self,
        name: str,
        loaded: LoadedModel,
        pages: int | None = None,
        kv_bytes: int | None = None,
        local_nodes: Collection[str] | None = None,
    ) -> None:
        """Register a model's local nodes as "name/node" and build their resources (E1–E5).

        `pages`: KV pages for requests; else as many as `kv_bytes` holds. A failure leaves nothing
        behind. Raises ValueError naming the resource at fault, KeyError naming node and key.
        """
        if name in self.models:
            raise ValueError(f"model {name!r} is loaded already")
        loaded.graph.validate()
        local = [n for n in loaded.graph.nodes if local_nodes is None or n in local_nodes]
        missing = [n for n in local if n not in loaded.submodules]
        if missing:
            raise ValueError(f"model {name!r}: no submodule for nodes {missing}")
        specs = local_specs(loaded, local)
        # Weights were loaded on the caller's stream; steps run on another.
        event = self.device.new_event()
        event.record()
        event.synchronize()
        with self.device.compute():
            resources = build_resources(
                loaded,
                specs,
                device=self.device.torch_device,
                default_dtype=self.dtype_default,
                pages=pages,
                kv_bytes=self._kv_bytes() if kv_bytes is None else kv_bytes,
            )
            try:
                nodes = {
                    n: self._bind(
                        f"{name}/{n}",
                        n,
                        loaded,
                        {s.key: resources[s.key] for s in specs if n in s.nodes},
                    )
                    for n in local
                }
            except BaseException:
                clean_up(resources.values())
                raise
        for m in nodes.values():
            self._nodes[m.name] = m
            self._runner.register(m.name, m.resources)
        self.models[name], self.resources[name] = loaded, resources

    def _bind(
        self, name: str, node: str, loaded: LoadedModel, resources: dict[str, Resource]
    ) -> SubmoduleManagement:
        submodule = loaded.submodules[node]
        submodule.requires_grad_(False)
        submodule.eval()
        submodule.bind_node_resources(NodeResources(name, resources))
        return SubmoduleManagement(
            name=name,
            node=node,
            submodule=submodule,
            resources=resources,
            states=LazyRequestStates(submodule.new_state),
            walks=tuple(w.name for w in loaded.graph.walks if node in w.nodes()),
            device=self.device.torch_device,
            publishers={
                k: r for k, r in resources.items() if type(r).publish is not Resource.publish
            },
        )

    def _kv_bytes(self) -> int:
        if self.device.torch_device.type == "cpu":
            return CPU_KV_BYTES
        return int(self.device.memory()[0] * GPU_KV_SHARE)

    def warmup(self) -> None:
        """One tiny real step per node and walk, then every resource validates itself (E9)."""
        for name, loaded in self.models.items():
            warm_up(self, name, loaded)
        for resource in self._all_resources():
            resource.post_warmup_validate()
        self.histograms = StepHistograms()
        self._counts = dict.fromkeys(self._counts, 0)

    def model_spec(self, name: str) -> ModelSpec:
        """What a worker announces of a loaded model."""
        loaded = self.models[name]
        pools = [r for r in self.resources[name].values() if isinstance(r, PagedKv)]
        caps = {
            f"{m.node}/{walk}": cap
            for m in self._nodes.values()
            if m.name == f"{name}/{m.node}"
            for walk in m.walks
            if (cap := self.get_max_batch_size(m.name, walk)) is not None
        }
        return ModelSpec(
            model=name,
            graph=loaded.graph,
            context=loaded.context,
            vocab=loaded.vocab,
            pages=min((p.pool.usable for p in pools), default=0),
            page_tokens=pools[0].page_tokens if pools else 0,
            max_batch=caps,
            eos=tuple(loaded.eos),
        )

    def get_max_batch_size(self, node: str, walk: str) -> int | None:
        """Most rows of one batch of `node` ("model/node") in `walk`; None is no cap (E37)."""
        return self._node(node).submodule.max_batch_size(walk)

    # ---- requests

    def add_request(
        self,
        node: str,
        request_id: int,
        params: Mapping[str, Any],
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Let a request use a node; `overrides` are by resource key, over `params`. Idempotent.

        If a resource raises, the request is unknown again to this node's resources.
        """
        self._requests.add(self._node(node), request_id, params, overrides or {})

    def remove_request(self, request_id: int) -> None:
        """Free all that a request has, everywhere (E39). Idempotent.

        Called between steps, on the GPU thread: what a step still running on the device reads is
        written again only by later work of the same stream. Every resource and submodule is asked,
        even if one raises; then the first error is raised.
        """
        self._requests.remove(request_id)

    def check_ready(self, request_id: int) -> bool:
        """Whether the request's state has landed; a pure poll (E36). CannotFit: it never will."""
        return self._requests.ready(request_id)

    # ---- a step

    def prepare_batch(self, batch: ExecutingBatch) -> None:
        """E11. Raises no Exception: one that is no single request's is stored on the batch."""
        start = self.clock.monotonic()
        if batch.submitted_at:
            batch.exec_timings.queued = start - batch.submitted_at
        try:
            m = self._node(batch.node_name)
            with self.device.compute(), m.modes():
                self._steps.prepare(m, batch)
        except Exception as e:
            batch.error = e
        batch.exec_timings.prepare += self.clock.monotonic() - start

    def exec(self, batch: ExecutingBatch) -> None:
        """Launch and commit a prepared batch. Raises what failed the whole step, also stored.

        `commit_done` is set on return, however it returns. No request left: no forward (E12).
        """
        try:
            m = self._node(batch.node_name)
            if batch.request_ids:
                with self.device.compute(), m.modes():
                    self._steps.run(m, batch)
        except BaseException as e:
            batch.error = e
            raise
        finally:
            batch.launch_started_event.set()
            batch.commit_done.set()

    def postprocess_batch(self, batch: ExecutingBatch) -> None:
        """E27: the author's `postprocess`, on the device still."""
        m = self._node(batch.node_name)
        with self.device.compute(), m.modes():
            self._steps.postprocess(m, batch)

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None:
        """`exec`, `postprocess_batch`, `completion_event`, `outputs_ready` (E23).

        On every exit an error is stored first, then all events are set; only what is no Exception
        (an interpreter going down) is raised.
        """
        try:
            if batch.error is None:
                self.exec(batch)
                self.postprocess_batch(batch)
        except BaseException as e:
            batch.error = e
            if not isinstance(e, Exception):
                raise
        finally:
            if batch.error is not None:
                batch.outputs = StepOutputs()
            self._complete(batch)

    def _complete(self, batch: ExecutingBatch) -> None:
        try:
            event = self.device.new_event()
            with self.device.compute():
                event.record()
            batch.completion_event = event
        except Exception as e:
            batch.error = batch.error or e
        counts = self._counts
        counts["steps"] += 1
        counts["failed_steps"] += batch.error is not None
        counts["refused_steps"] += batch.admit_error is not None
        counts["failed_requests"] += len(batch.failed_requests)
        batch.launch_started_event.set()
        batch.commit_done.set()
        batch.outputs_ready.set()

    # ---- tail (postprocess thread)

    def check_stop_for_batch(
        self, batch: ExecutingBatch, host_outputs: HostOutputs
    ) -> dict[int, set[str]]:
        """Request → names of loops that the author's `check_stop` ends, of rows with outputs.

        EOS, length and stop ids are the caller's, on the column. A raise fails that request only
        (E28).
        """
        return tail.check_stop(self.device, self._node(batch.node_name), batch, host_outputs)

    def finalize_batch(self, batch: ExecutingBatch) -> None:
        """Publish what other workers need, into `batch.finalized` and the infos' facts (E29).

        Then the step's timings are observed: call it last.
        """
        tail.publish(self._runner, self._node(batch.node_name), batch)
        self.histograms.observe(batch.exec_timings)

    # ---- upkeep

    def is_fatal(self, error: BaseException) -> bool:
        """Whether this error lost the device, so that the worker must end."""
        return self.device.fatal(error)

    def check(self) -> None:
        """Invariants of every resource (P16); raises InvariantViolation."""
        with self._runner.lock:
            for resource in self._all_resources():
                resource.check()

    def statistics(self) -> dict[str, Any]:
        """Counts, `"model/resource.name"` figures, pages summed over all pools, histograms."""
        found: dict[str, Any] = {**self._counts, "requests": len(self._requests)}
        pages = dict.fromkeys(("pages_total", "pages_free", "pages_used"), 0)
        for model, resources in self.resources.items():
            for key, resource in resources.items():
                for name, value in resource.statistics().items():
                    found[f"{model}/{key}.{name}"] = value
                    if name in pages:
                        pages[name] += int(value)
        return {**found, **pages, "step_seconds": self.histograms.snapshot()}

    def shutdown(self) -> None:
        """Clean up every resource, even if one raises; then the first error is raised (E40)."""
        resources = list(self._all_resources())
        for name in self._nodes:
            self._runner.forget(name)
        self._nodes.clear()
        self._requests.clear()
        self.resources.clear()
        self.models.clear()
        errors = clean_up(resources[::-1])
        attempt(self.device.close, errors)
        if errors:
            raise errors[0]

    def _all_resources(self) -> Iterable[Resource]:
        return (r for by_key in self.resources.values() for r in by_key.values())

    def _node(self, name: str) -> SubmoduleManagement:
        found = self._nodes.get(name)
        if found is None:
            raise Bug(f"no node {name!r} here; nodes: {sorted(self._nodes)}")
        return found
