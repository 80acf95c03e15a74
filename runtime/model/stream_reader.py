"""Reads a stream one sample after another, for as many epochs as are asked for, and finds its place again.

A stream has no numbers, so the samples of a run are counted as they are read. When the stream ends, the next
epoch begins: it is iterated again, after `set_epoch(e)` if it has that. The k-th sample of an epoch is read
with torch, NumPy and Python seeded by (seed, epoch, k), as item k of a map-style dataset is loaded.

A checkpoint records how many samples were taken, the stream's own `state_dict()` if it has one, and the
digests of the next samples. A resumed run tries the state; if other samples come after it, as with shuffle
buffers that are filled again, it reads the epoch again and skips what was taken; then all epochs. Only a
stream that gives the recorded samples next is taken for the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from secc.runtime.errors import UserError
from secc.runtime.host.hidden_ranks import hidden_ranks
from secc.runtime.model.item_seeds import call_seeded, derive_item_seed
from secc.runtime.model.sample_forms import sample_as_dict
from secc.runtime.model.sample_sources import SampleSource, describe_type
from secc.runtime.model.stream_state import decode_state, digest_value, encode_state

LOOKAHEAD = 3  # samples after a recorded place that have to be the same
_END = object()


class StreamFailure(UserError):
    """A stream cannot be read on."""


class StreamSample(NamedTuple):
    """A sample of a stream: epoch, number in the epoch, the item, its digest. `error` stands for the item if
    the stream raised."""

    epoch: int
    index: int
    item: dict[str, Any]
    digest: int
    error: UserError | None = None


class StreamPosition(NamedTuple):
    """The place before a sample: how many were `taken` from the stream in all, its epoch and number, the
    digest of the epoch's samples so far, the stream's encoded state if it has one, and the digests of the
    next samples."""

    taken: int
    epoch: int
    index: int
    digest: int
    state: Mapping[str, Any] | None
    next_digests: Sequence[int] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of a checkpoint's manifest."""
        return self._asdict() | {"next_digests": list(self.next_digests)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StreamPosition | None:
        """Reads what `as_json` gave; None for an entry that says only how many samples were taken."""
        if "index" not in entry:
            return None
        place = cls(*(entry[name] for name in cls._fields))
        return place._replace(next_digests=tuple(place.next_digests))


class StreamReader:
    """Reads the samples of one stream in order, numbered over all epochs.

    `epoch_length`: the number of samples that each epoch must have, if that is known.
    """

    def __init__(self, source: SampleSource, seed: int = 0, epoch_length: int | None = None) -> None:
        self._source, self._seed, self._epoch_length = source, seed, epoch_length
        self._kept: dict[int, StreamSample] = {}
        self._marks: set[int] = set()  # numbers of samples with places before them that will be asked for
        self._restart()

    def _restart(self) -> None:
        """Begins from the first sample of epoch 0."""
        self._stream = self._source.open_stream()
        self._iterated = False  # this stream
        self._iterator: Iterator[Any] | None = None  # of this epoch
        self.next_number, self._epoch, self._index, self._digest = 0, 0, 0, 0
        self._pending: list[Any] = []  # an item, or the error of one, that was read and not taken yet
        self._failure: StreamFailure | None = None
        self.ended_epochs: list[int] = []  # their lengths; the caller takes them out
        self._kept.clear()
        self._places: dict[int, StreamPosition] = {}  # by number, without the digests of what follows

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, number: int) -> StreamSample:
        """Returns the sample with this number, and reads up to it. Raises StreamFailure if the stream cannot
        be read on; a sample that raises is returned with its error."""
        while number >= self.next_number:
            if self.next_number in self._marks:
                self._record_place()
            self._kept[self.next_number] = self._read_next()
            self.next_number += 1
        return self._kept[number]

    def raise_failure(self) -> None:
        """Raises the error of a stream that ended with an exception."""
        if self._failure is not None:
            raise self._failure

    def forget_before(self, number: int) -> None:
        """Drops samples that are not asked for any more."""
        for old in [n for n in self._kept if n < number]:
            del self._kept[old]
        self._marks = {n for n in self._marks if n >= number}
        self._places = {n: place for n, place in self._places.items() if n >= number}

    def _read_next(self) -> StreamSample:
        if self._failure is not None:
            return StreamSample(self._epoch, self._index, {}, 0, self._failure)
        item, error = {}, None
        try:
            item = self._take_item()
            while item is _END:
                self._end_epoch()
                item = self._take_item()
        except StreamFailure:
            raise
        except UserError as raised:
            item, error = {}, self._handle_exception(raised)
        if self._index == self._epoch_length:
            raise self._wrong_length_error("goes on after")
        named = sample_as_dict(item)
        if named is None:
            error = UserError(
                f"{self._source.expression} gives {describe_type(item)} as sample {self._index}, not a dict",
                self._source.place,
                "yield a dict of forward's arguments, or a tuple that collate(samples) makes one of",
            )
            named = {}
        digest = digest_value(item)
        sample = StreamSample(self._epoch, self._index, named, digest, error)
        self._digest = digest_value([self._digest, digest])
        self._index += 1
        return sample

    def _take_item(self, later: int = 0) -> Any:
        """Returns the next item, or the one `later` places after it."""
        if self._pending:
            item = self._pending.pop()
            if isinstance(item, UserError):
                raise item
            return item
        index = self._index + later
        what = f"{self._source.expression}, sample {index} of epoch {self._epoch + 1},"
        with hidden_ranks():
            return call_seeded(
                lambda: self._source.guard(what, self._next_item),
                derive_item_seed(self._seed, self._epoch, self._source.first_id + index),
            )

    def _next_item(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open_epoch()
        return next(self._iterator, _END)

    def _open_epoch(self) -> Iterator[Any]:
        if self._iterated and callable(getattr(self._stream, "__next__", None)):
            self._stream = self._source.open_stream()  # a generator cannot be iterated twice
        self._iterated = True
        _set_epoch(self._stream, self._epoch)
        return iter(self._stream)

    def _end_epoch(self) -> None:
        if not self._index:
            again = f" when it is read again, for epoch {self._epoch + 1}" if self._epoch else ""
            raise StreamFailure(
                f"{self._source.expression} gives no samples{again}",
                self._source.place,
                "let every iter() start from the beginning" if again else "return a stream with samples",
            )
        if self._epoch_length is not None and self._index < self._epoch_length:
            raise self._wrong_length_error("ends after")
        self.ended_epochs.append(self._index)
        self._epoch, self._index, self._digest, self._iterator = self._epoch + 1, 0, 0, None

    def _wrong_length_error(self, what: str) -> StreamFailure:
        return StreamFailure(
            f"{self._source.expression} {what} {self._index} samples, but its len() is {self._epoch_length}",
            self._source.place,
            "correct its __len__, or give --steps in place of --epochs",
        )

    def _handle_exception(self, error: UserError) -> UserError:
        """Returns the error of a sample that raised. If nothing comes after it, the stream has failed:
        generators end where they raise."""
        try:
            following = self._take_item(later=1)
        except UserError as next_error:
            following = next_error
        if following is not _END:
            self._pending.append(following)
            return error
        remedy = "catch the exception in the stream and go on: a generator ends where it raises"
        self._failure = StreamFailure(error.message, error.where, remedy)
        return self._failure

    # -- the position ---------------------------------------------------------------------------------------

    def mark_places(self, numbers: Iterable[int]) -> None:
        """Says for which samples `find_position` will be asked, before they are read."""
        self._marks |= set(numbers)

    def find_position(self, taken: int) -> StreamPosition:
        """Returns the place after the first `taken` samples. The samples after it are not read yet, or the
        place was marked before. Reads LOOKAHEAD samples more, for their digests."""
        if taken == self.next_number:
            self._record_place()
        return self._places[taken]._replace(next_digests=self._digests_from(taken))

    def _record_place(self) -> None:
        state = None if self._pending or self._failure else self._encode_state()
        place = StreamPosition(self.next_number, self._epoch, self._index, self._digest, state)
        self._places[self.next_number] = place

    def _digests_from(self, number: int) -> tuple[int, ...]:
        """Returns the digests of the next samples; fewer if the stream cannot be read so far."""
        digests: list[int] = []
        for n in range(number, number + LOOKAHEAD):
            try:
                digests.append(self.read(n).digest)
            except StreamFailure:  # raised again if the sample is asked for
                break
        return tuple(digests)

    def _encode_state(self) -> Mapping[str, Any] | None:
        if not _has_state(self._stream):
            return None
        what = f"{self._source.expression}.state_dict()"
        with hidden_ranks():
            return encode_state(self._source.guard(what, self._stream.state_dict))

    def resume(self, position: StreamPosition, accepts_change: bool = False) -> str:
        """Goes to a recorded place, and returns how, in words. Raises StreamFailure if the stream gives
        other samples there, unless `accepts_change`."""
        ways: list[tuple[Callable[[StreamPosition], None], str]] = [
            (self._skip_in_epoch, f"{position.index} samples of epoch {position.epoch + 1} were read again"),
            (self._skip_epochs, f"{position.taken} samples were read again"),
        ]
        if position.state is not None:
            ways.insert(0, (self._load_state, "by its state_dict()"))
        reached: list[tuple[Callable[[StreamPosition], None], str]] = []
        for go, how in ways:
            try:
                go(position)
                is_same = self._digest == position.digest
                following = self._digests_from(position.taken)
                if is_same and following == position.next_digests:
                    return how
            except UserError:
                continue
            reached.append((go, how))
        if accepts_change and reached:
            go, how = reached[0]
            go(position)
            return how
        raise StreamFailure(
            f"{self._source.expression} is another stream than the checkpoint's run read: the first"
            f" {position.taken + LOOKAHEAD} samples differ",
            self._source.place,
            "give the stream of that run, shuffled with the same seeds, or go on at this place with"
            " --allow-change dataset",
        )

    def skip(self, count: int) -> None:
        """Reads samples up to number `count` and forgets them."""
        while self.next_number < count:
            self.read(self.next_number)
            self.raise_failure()
            self.forget_before(self.next_number)
        self.ended_epochs.clear()

    def _load_state(self, position: StreamPosition) -> None:
        self._restart()
        if position.state is None or not _has_state(self._stream):
            raise StreamFailure(f"{self._source.expression} has no load_state_dict()", self._source.place)
        state = decode_state(position.state)
        with hidden_ranks():
            _set_epoch(self._stream, position.epoch)
            what = f"{self._source.expression}.load_state_dict()"
            self._source.guard(what, lambda: self._stream.load_state_dict(state))
        self.next_number, self._epoch = position.taken, position.epoch
        self._index, self._digest = position.index, position.digest

    def _skip_in_epoch(self, position: StreamPosition) -> None:
        self._restart()
        self.next_number, self._epoch = position.taken - position.index, position.epoch
        self.skip(position.taken)

    def _skip_epochs(self, position: StreamPosition) -> None:
        self._restart()
        self.skip(position.taken)


def _set_epoch(stream: Any, epoch: int) -> None:
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _has_state(stream: Any) -> bool:
    """Whether a stream can save and load its state by calls without further arguments: MosaicML's wants to
    be told how many samples were read."""
    save, load = getattr(stream, "state_dict", None), getattr(stream, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    try:
        inspect.signature(save).bind()
    except (TypeError, ValueError):
        return False
    return True
