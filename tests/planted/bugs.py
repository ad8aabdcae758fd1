"""The bugs that `test_planted_bugs` plants: each switches one guard off.

`fails` is a prefix of the test id that must fail. Where an edit no longer applies, the code has
moved: plant the bug anew.
"""

from dataclasses import dataclass

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
IMPORTS = ("-c", "from importlinter.cli import lint_imports_command as m; m()")


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """`command` runs with the interpreter in the copy; `says` must be in what it prints."""

    edits: tuple[Edit, ...]
    command: tuple[str, ...]
    says: str


def bug(test: str, *edits: tuple[str, str, str], files: tuple[str, ...] = ()) -> Bug:
    """A bug caught by a test whose id begins so; `files` to run, if it is not the id's own."""
    run = files or (test.split("::", maxsplit=1)[0],)
    return Bug(tuple(Edit(*e) for e in edits), (*PYTEST, *run), f"FAILED {test}")


def crossing(file: str, old: str, new: str) -> Bug:
    """An import that crosses the packages' borders."""
    says = "conductor and worker never see each other; the conductor has no torch BROKEN"
    return Bug((Edit(file, old, new),), IMPORTS, says)


CORE = "tests/conductor/core/test_core"
ENGINE = "tests/worker/engine/test_engine"
SCHEDULER = "tests/worker/micro_scheduler/test_scheduler"
OWNER = "tests/protocol/client/test_owner.py"
COMMIT = (
    "worker/engine/engine.py",
    "            batch.launch_started_event.set()\n            batch.commit_done.set()\n",
    "            batch.launch_started_event.set()\n",
)

BUGS: dict[str, Bug] = {
    # ---- resources: pages, transactions
    "a page leak": bug(
        "tests/worker/resources/test_resource_contract.py::test_contract[paged_kv",
        (
            "worker/resources/kv/paged.py",
            "                self._give_all((request_id, label))\n"
            "                self._streams.release((request_id, label))\n",
            "                self._streams.release((request_id, label))\n",
        ),
    ),
    "the sink page is handed out": bug(
        "tests/worker/resources/test_page_pool.py",
        (
            "worker/resources/kv/pages.py",
            "np.arange(usable, 0, -1, dtype=np.int64)",
            "np.arange(usable - 1, -1, -1, dtype=np.int64)",
        ),
    ),
    "a rollback that keeps the pages": bug(
        "tests/worker/resources/test_resource_contract.py::test_contract[paged_kv",
        (
            "worker/resources/kv/paged.py",
            '        self._shrink(slots, self._pages(self._streams.column("length")[slots]))\n'
            "        self._plan = None\n",
            "        self._plan = None\n",
        ),
    ),
    "a page that keeps what its former request left": bug(
        "tests/worker/resources/test_paged_kv.py::test_a_partly_filled_page",
        (
            "worker/resources/kv/paged.py",
            "        self._clear_fresh(rows.slots, length, after)\n",
            "",
        ),
    ),
    "a refusal that does not undo earlier resources": bug(
        f"{ENGINE}_step.py::test_a_later_resource_that_refuses",
        (
            "worker/engine/step_runner.py",
            "                    _undo(tried, ctx)\n                    return FullAdmitOutcome",
            "                    return FullAdmitOutcome",
        ),
    ),
    "a failed forward that is not rolled back": bug(
        f"{ENGINE}",
        (
            "worker/engine/eager_step.py",
            "            self._runner.rollback(m.name, part.step, part.ctx)\n"
            "            if not isinstance(e, Exception)",
            "            if not isinstance(e, Exception)",
        ),
        files=(f"{ENGINE}_step.py",),
    ),
    # ---- the step
    "a skipped commit_done": bug(f"{ENGINE}_step.py::test_exec_alone_sets_commit_done", COMMIT),
    "commit_done never set after a commit": Bug(
        (
            Edit(*COMMIT),
            Edit(
                "worker/engine/engine.py",
                "        batch.commit_done.set()\n        batch.outputs_ready.set()\n",
                "        batch.outputs_ready.set()\n",
            ),
            Edit("worker/engine/eager_step.py", "        batch.commit_done.set()\n", ""),
        ),
        (*PYTEST, f"{ENGINE}_reference.py"),
        "assert batch.commit_done.is_set()",
    ),
    "a swallowed exception in forward": bug(
        f"{ENGINE}_faults.py::test_the_poisoned_request_fails_alone",
        (
            "worker/engine/eager_step.py",
            "            self._fail(batch, rids[0], part.stage, error)\n            return []\n",
            "            return []\n",
        ),
    ),
    # ---- the worker's threads and scheduler
    "tokens after the end are sent": bug(
        "tests/worker/engine/test_threads_postprocess.py",
        (
            "worker/engine/step_tail.py",
            "        live = ~table.over[slots]\n",
            "        live = np.ones(len(rows), np.bool_)\n",
        ),
    ),
    "more steps in flight than the depth": bug(
        f"{SCHEDULER}",
        (
            "worker/micro_scheduler/select.py",
            "    while len(s.flights) < s.depth:\n",
            "    while len(s.flights) <= s.depth:\n",
        ),
        files=(f"{SCHEDULER}.py",),
    ),
    "pages go while a step still holds the row": bug(
        f"{SCHEDULER}",
        (
            "worker/micro_scheduler/state.py",
            "        if row.in_flight == 0:\n            self.retire(row)\n",
            "        self.retire(row)\n",
        ),
        files=(f"{SCHEDULER}.py",),
    ),
    "a trial that has company": bug(
        f"{SCHEDULER}",
        (
            "worker/micro_scheduler/select.py",
            "        if r.may_step and r.batch == number and (not trial or r.on_trial)\n",
            "        if r.may_step and r.batch == number\n",
        ),
        files=(f"{SCHEDULER}.py",),
    ),
    "a limit that does not park": bug(
        f"{SCHEDULER}",
        (
            "worker/micro_scheduler/select.py",
            "    if batch.life.state is BatchState.PARKED:\n        return []\n",
            "",
        ),
        files=(f"{SCHEDULER}.py",),
    ),
    # ---- the conductor
    "a missed rebase": bug(
        f"{CORE}_supervision.py",
        (
            "conductor/core/loss.py",
            "    affected = list(worker.stakes.values())\n",
            "    affected = list(worker.stakes.values())[1:]\n",
        ),
    ),
    "a rebase that keeps the attempt": bug(
        f"{CORE}",
        ("conductor/core/requests.py", "    request.attempt += 1\n", ""),
        files=(f"{CORE}_sequences.py",),
    ),
    "a lost life that is taken back": bug(
        f"{CORE}",
        (
            "conductor/core/sessions.py",
            "    elif s.registry.fenced(life):\n",
            "    elif False:\n",
        ),
        files=(f"{CORE}_sequences.py",),
    ),
    "a queue without a bound": bug(
        f"{CORE}_admission.py",
        (
            "conductor/core/admission.py",
            "        if self.length >= limits.max_queued:\n",
            "        if False:\n",
        ),
    ),
    "a prompt longer than the context": bug(
        f"{CORE}_admission.py",
        (
            "conductor/core/admission.py",
            "    if n >= spec.context:\n        raise PromptTooLong",
            "    if False:\n        raise PromptTooLong",
        ),
    ),
    "a deadline that passes in silence": bug(
        f"{CORE}_deadlines.py",
        (
            "conductor/core/supervision.py",
            "    requests.pass_deadlines(s)\n",
            "",
        ),
    ),
    "replays without a bound": bug(
        f"{CORE}",
        (
            "conductor/core/requests.py",
            "        or request.replays > trials.MAX_REPLAYS\n",
            "",
        ),
        files=(f"{CORE}_sequences.py",),
    ),
    "a crash alone that convicts nobody": bug(
        f"{CORE}_trials.py",
        (
            "conductor/core/loss.py",
            "        return wanted[0]\n    return None\n",
            "        return None\n    return None\n",
        ),
    ),
    "a worker that is never found silent": bug(
        f"{CORE}_supervision.py",
        (
            "conductor/core/supervision.py",
            "        if silent > s.silence:\n            what =",
            "        if False:\n            what =",
        ),
    ),
    "a hang that is never found": bug(
        f"{CORE}_supervision.py",
        (
            "conductor/core/supervision.py",
            "worker.step_age > limit:",
            "worker.step_age > 1e9:",
        ),
    ),
    # ---- the owner of streams
    "a late attempt's tokens are taken": bug(
        OWNER,
        (
            "protocol/client/owner.py",
            "        elif m.attempt[i] != s.attempt:\n",
            "        elif m.attempt[i] > s.attempt:\n",
        ),
    ),
    "a late attempt's next token is taken": bug(
        OWNER,
        (
            "protocol/client/owner.py",
            "                and attempt == s.attempt\n",
            "",
        ),
    ),
    "a gap in the tokens is taken": bug(
        OWNER,
        ("protocol/client/owner.py", "        if first > length:\n", "        if False:\n"),
    ),
    "a contradiction is not noticed": bug(
        OWNER,
        (
            "protocol/client/owner.py",
            "            if s.tokens[first : first + known] != tokens[:known]:\n",
            "            if False:\n",
        ),
    ),
    "a waiting End survives a rebase": bug(
        OWNER,
        (
            "protocol/client/owner.py",
            "                s.awaited = None\n                s.noted_error = None\n",
            "                s.noted_error = None\n",
        ),
    ),
    # ---- links and bytes
    "a hole in a session is not noticed": bug(
        "tests/protocol/test_session.py::test_a_hole",
        (
            "protocol/session.py",
            "        if envelope.b != self._received + 1:\n",
            "        if False:\n",
        ),
    ),
    "what was not acknowledged is forgotten": bug(
        "tests/protocol/test_session.py::test_kept_messages",
        (
            "protocol/session.py",
            "next(iter(self._kept)) <= envelope.c:",
            "next(iter(self._kept)) <= self._sent:",
        ),
    ),
    "frames are not sent again": bug(
        "tests/protocol/test_stream_link.py::test_losses_heal",
        (
            "protocol/stream_link.py",
            "if message.resend else []",
            "if False else []",
        ),
    ),
    "plain rows are lost when tokens coalesce": bug(
        "tests/protocol/test_stream_link.py",
        (
            "protocol/stream_link.py",
            "for e in (*(plain.emits() if plain is not None else ()), *emits):",
            "for e in emits:",
        ),
    ),
    "the completion event comes before the launch": bug(
        "tests/worker/",
        (
            "worker/engine/engine.py",
            "        try:\n            if batch.error is None:\n                self.exec(batch)\n",
            "        try:\n            if batch.error is None:\n"
            "                self._complete(batch)\n                self.exec(batch)\n",
        ),
        files=("tests/worker/engine/test_engine_step.py",),
    ),
    "columns of different lengths are taken": bug(
        "tests/protocol/test_codec.py::test_columns_of_different_lengths",
        (
            "protocol/codec.py",
            "            if of >= 0 and len(col) != len(values[of]):\n",
            "            if False:\n",
        ),
    ),
    "an unknown configuration key is taken": bug(
        "tests/protocol/test_config.py",
        ("protocol/config.py", 'extra="forbid"', 'extra="ignore"'),
    ),
    "a second bind takes the traffic over": bug(
        "tests/protocol/channel/test_contract.py::test_a_second_bind",
        (
            "protocol/channel/zeromq.py",
            "            if _somebody_listens(path):\n",
            "            if False:\n",
        ),
    ),
    # ---- the gateway
    "a stop string is not held back": bug(
        "tests/conductor/gateway/test_stop_strings.py",
        (
            "conductor/gateway/stop_strings.py",
            "        keep = max(self._overlap(text, s) for s in self._stops)\n",
            "        keep = 0\n",
        ),
    ),
    "a broken character is shown": bug(
        "tests/conductor/gateway/test_detokenizer.py",
        (
            "conductor/gateway/detokenizer.py",
            "        return self._decoder.decode(data)\n",
            '        return data.decode("utf-8", errors="replace")\n',
        ),
    ),
    # ---- borders
    "an import of torch in the conductor": crossing(
        "conductor/core/machine.py", "from conductor.core", "import torch\nfrom conductor.core"
    ),
    "an import of the worker in the conductor": crossing(
        "conductor/core/walk.py",
        "from protocol.graph import",
        "import worker.api.model\nfrom protocol.graph import",
    ),
}
