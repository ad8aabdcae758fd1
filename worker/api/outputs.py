"""A step's outputs: columns over its rows, and views of them per request."""

from collections.abc import Iterator, Mapping, Sequence

import torch


class StepOutputs:
    """Request id → name → list of tensors (E22).

    A column is one tensor whose first dimension is the step's sampling rows; a row's view of it is
    made when asked for. Per-request outputs (of the unbatched path) are kept as they came.
    """

    def __init__(
        self,
        request_ids: Sequence[int] = (),
        columns: Mapping[str, torch.Tensor] | None = None,
        rows: Mapping[int, dict[str, list[torch.Tensor]]] | None = None,
    ) -> None:
        self.request_ids = list(request_ids)
        self.columns = dict(columns or {})
        self._index = {r: i for i, r in enumerate(self.request_ids)}
        self._rows = dict(rows or {})
        for name, c in self.columns.items():
            if c.shape[0] != len(self.request_ids):
                n = len(self.request_ids)
                raise ValueError(f"output column {name!r}: {c.shape[0]} rows for {n} requests")

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._index or request_id in self._rows

    def __iter__(self) -> Iterator[int]:
        yield from self._index
        yield from (r for r in self._rows if r not in self._index)

    def __len__(self) -> int:
        return sum(1 for _ in self) if self._rows else len(self._index)

    def __getitem__(self, request_id: int) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = dict(self._rows.get(request_id, {}))
        i = self._index.get(request_id)
        if i is not None:
            for name, c in self.columns.items():
                found.setdefault(name, [c[i : i + 1]])
        elif request_id not in self._rows:
            raise KeyError(request_id)
        return found

    def row_of(self, request_id: int) -> int | None:
        """Index into the columns, or None."""
        return self._index.get(request_id)

    def set_row(self, request_id: int, outputs: dict[str, list[torch.Tensor]]) -> None:
        self._rows[request_id] = outputs

    def drop(self, request_id: int) -> None:
        """Forget one request's outputs; columns keep their shape."""
        self._index.pop(request_id, None)
        self._rows.pop(request_id, None)

    @classmethod
    def concat(cls, parts: "Sequence[StepOutputs]") -> "StepOutputs":
        """The outputs of a step that ran in parts (E14), in order.

        Columns that every part has, of one row shape and dtype, stay columns; the rest become
        per-request rows.
        """
        parts = [p for p in parts if len(p)]
        if len(parts) == 1:
            return parts[0]
        kinds = {
            tuple(sorted((n, c.dtype, c.shape[1:]) for n, c in p.columns.items())) for p in parts
        }
        whole = all(not p._rows and len(p._index) == len(p.request_ids) for p in parts)
        if parts and whole and len(kinds) == 1:
            ids = [r for p in parts for r in p.request_ids]
            names = list(parts[0].columns)
            return cls(ids, {n: torch.cat([p.columns[n] for p in parts]) for n in names})
        merged = cls()
        for p in parts:
            merged.merge(p)
        return merged

    def merge(self, other: "StepOutputs") -> None:
        """Take over another step part's outputs as per-request rows (E14)."""
        for r in other:
            self._rows[r] = other[r]
