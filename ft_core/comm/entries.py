"""Records of completed operations: one alone, and those of many training steps, packed."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from ft_core.protocol.messages import StartupEntry as Entry


class Kinds:
    """What operations have in common beside their results, by number: there are few different ones."""

    def __init__(self) -> None:
        self._known: list[tuple[str, str, tuple[int, ...] | None]] = []
        """Kind, signature, sizes of results in bytes."""
        self._numbers: dict[tuple[str, str, tuple[int, ...] | None], int] = {}

    def number(self, entry: Entry) -> int:
        """The number of this entry's kind, a new one for what was not seen before."""
        sizes = None if entry.tensors is None else tuple(map(len, entry.tensors))
        kind = entry.kind, entry.signature, sizes
        if kind not in self._numbers:
            self._numbers[kind] = len(self._known)
            self._known.append(kind)
        return self._numbers[kind]

    def entry(self, number: int, data: bytes) -> Entry:
        """Inverse of `number`: an entry of that kind with its results, `data`, one after the other."""
        kind, signature, sizes = self._known[number]
        if sizes is None:
            return Entry(kind, signature, None)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        results = tuple(data[end - size : end] for end, size in zip(ends, sizes, strict=True))
        return Entry(kind, signature, results)


class Column:
    """The operations of one group or pair in all steps that are over: some 20 bytes each, and their results.

    There may be one or more for each step that the job has done, so an object for each would be too much.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._steps = array("q")
        """The step of each operation, ascending."""
        self._numbers = array("I")
        self._ends = array("q")
        """Where its results end, counted from the first that was ever put in."""
        self._dropped = 0
        """Bytes that are not in `_data` any more."""
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: int, entries: Sequence[Entry]) -> None:
        """All operations of a step, which is later than those before."""
        for entry in entries:
            self._data += b"".join(entry.tensors or ())
            self._steps.append(step)
            self._numbers.append(self._kinds.number(entry))
            self._ends.append(self._dropped + len(self._data))

    def drop(self, until: int) -> int:
        """Forget the steps before `until`. Returns how many bytes of results they had."""
        gone = bisect_left(self._steps, until)
        before = self._dropped
        self._dropped = self._begin(gone)
        del self._data[: self._dropped - before]
        for values in (self._steps, self._numbers, self._ends):
            del values[:gone]
        return self._dropped - before

    def count(self, step: int) -> int:
        """Operations of that step."""
        return bisect_right(self._steps, step) - bisect_left(self._steps, step)

    def since(self, step: int, skipped: int = 0) -> Iterator[tuple[int, Entry]]:
        """(step, entry) for the operations of that step but for the first few, and of all later ones."""
        for i in range(bisect_left(self._steps, step) + skipped, len(self)):
            data = self._data[self._begin(i) - self._dropped : self._ends[i] - self._dropped]
            yield self._steps[i], self._kinds.entry(self._numbers[i], bytes(data))

    def _begin(self, i: int) -> int:
        return self._ends[i - 1] if i else self._dropped
