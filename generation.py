"""One request on its way: the prompt read in chunks, then windows of one token and its drafts.

It owns checkpoints taken on the way, drafts and the end of an answer; it knows no lines and no files, and a session
only by what it is given. Invariant: between two events the cache holds a whole prefix of prompt and answer. Read next:
engine.py for the session that resumes and keeps, model.py for a pass.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvcache import Cache, Snapshot
from model import Model
from promptcache import Offer, Timeline
from sampling import NotFinite, next_token
from verbs import SPARE_CELLS, Done, GenRequest, PromptProgress, Resume, Reused, Source, Token

CHUNK = 512  # prompt tokens read between two looks at STOP
BEFORE_END = 16  # tokens that may follow what changes at the end of a message: a closing mark, the rest of a line
NEAR = 16  # tokens: a checkpoint so close behind another one is not worth its bytes, a guess twice so close
DRAFT_FLOOR = 0.3  # a draft less probable than this is not worth its place in a window


class RequestFailed(Exception):
    """A request that cannot go on; the conversation that it worked on is forgotten, and the process stays."""


class FatalError(Exception):
    """A restore that failed after a pool was written, or a device that failed in a request; the process must end."""


class Resumed(NamedTuple):
    """Where a request is read, what it goes on from, and how far it goes along with anything that was held."""

    timeline: Timeline
    offer: Offer
    diverged_at: int
    back: Snapshot | None = None  # the state to go back to behind a request of which nothing is kept


class DraftLayer:
    """Guesses what follows with the draft layer of the model, greedily; nothing where there is none."""

    def __init__(self, model: Model, window: int):
        """`window` is the number of guesses and the one token before them."""
        self._model, self._window = model, window

    def guess(self, context: np.ndarray, n_most: int, cache: Cache, rows, cell: int) -> np.ndarray:
        """At most `n_most` guesses int32 of what follows `context`, all tokens so far.

        `rows` [T, C, N] is what the draft layer made of the latest of them (None without one), `cell` its next cell.
        """
        drafts: list[int] = []
        n_wanted = min(self._window - 1, n_most)
        while rows is not None and len(drafts) < n_wanted:
            token, share = self._model.ops.greedy_with_share(self._model.draft_logits(rows[-1:]))
            if token[0] < 0 or not share[0] >= DRAFT_FLOOR:  # nor where it is not a number
                break
            drafts.append(int(token[0]))
            if len(drafts) < n_wanted:
                rows = self._model.draft(cache, rows[-1:], np.array(drafts[-1:], np.int32), cell)
                cell += 1
        return np.array(drafts, np.int32)


class Generation:
    """One request on its way: prompt, then windows of one token and its drafts."""

    def __init__(self, session, request: GenRequest, stopped: Callable[[], bool]):
        self.session, self.request, self.stopped = session, request, stopped
        self.engine, self.model = session.engine, session.engine.model
        self.stop_ids = self.engine.end_ids | request.stop
        seed = request.sampling.seed
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.context = np.empty(len(request.prompt) + request.max_new + SPARE_CELLS, np.int32)  # prompt, answer
        self.context[: len(request.prompt)] = request.prompt
        self.n_context = len(request.prompt)
        self.finish = ""
        self.residual = None  # [1, C, N] of the prompt's last token, the backend's array
        self.n_drafts_accepted = self.n_drafts_offered = 0
        self.experts = self.engine.expert_counts

    @property
    def n_generated(self) -> int:
        return self.n_context - len(self.request.prompt)

    def events(self) -> Iterator[NamedTuple]:
        """Resume, prompt progress, Reused (and Source), tokens (then Held), Done.

        Raises RequestFailed where the model gave nothing to choose from, and FatalError where a device failed.
        """
        started = time.perf_counter()
        try:
            self.resumed = self.session.resume(self.request)
            self.cache, self.n_reused = self.resumed.timeline.cache, self.resumed.offer.n_tokens
            try:
                yield from self._events(started)
            except GeneratorExit:
                self.session.finish(self.request, self.resumed)  # whoever asked has gone: what was read is whole
                raise
        except NotFinite as error:
            self.session.forget(self.resumed)
            raise RequestFailed(f"{error}; {self._who_is_to_blame()}") from error
        except self.engine.ops.errors as error:
            raise FatalError(f"the device failed in a request: {error}") from error

    def _who_is_to_blame(self) -> str:
        if self.n_reused:
            return f"the {self.n_reused} tokens that were held may be damaged and are dropped: send the request again"
        return "the model's weights may be damaged"

    def _events(self, started: float) -> Iterator[NamedTuple]:
        yield Resume(self.n_reused)
        yield from self._read_prompt(started)
        yield Reused(self.n_reused)
        if self.request.source:
            yield Source(self.resumed.offer.source, self.n_reused, self.resumed.diverged_at)
        prompt_ms = 1e3 * (time.perf_counter() - started)
        started = time.perf_counter()
        n_prompt, n_read = len(self.request.prompt), self.cache.n_tokens - self.n_reused
        if not self.finish:
            for token in self._answer():
                yield Token(token)
        self.session.finish(self.request, self.resumed)
        hits, lookups, copied = (now - then for now, then in zip(self.engine.expert_counts, self.experts, strict=True))
        yield Done(
            self.n_generated, n_prompt, prompt_ms, 1e3 * (time.perf_counter() - started), self.finish,
            self.n_drafts_accepted, self.n_drafts_offered, self.n_reused, hits, lookups, 0, 0, 0.0, n_read, copied,
        )  # fmt: skip
        self.engine.save_expert_profile(at_once=False)

    # --- the prompt

    def _read_prompt(self, started: float) -> Iterator[PromptProgress]:
        """Read what is not held, chunk by chunk; leaves the residual of the last token for the answer."""
        prompt, n_prompt = self.request.prompt, len(self.request.prompt)
        marks = self._checkpoint_marks()
        resumed = self.cache.n_tokens
        while self.cache.n_tokens < n_prompt:
            first = self.cache.n_tokens
            if self.stopped():
                # The rest of the prompt may come again: what was read so far is kept as a checkpoint.
                self._checkpoint(root=False)
                self.finish = "cancel"
                return
            last = min([first + CHUNK, n_prompt, *(mark for mark in marks if mark > first)])
            residual = self.session.read(self.resumed.timeline, prompt, last)
            if last in marks or self._is_periodic(first, last):
                self._checkpoint(root=marks.get(last, False))
            seconds = time.perf_counter() - started
            rate = (last - resumed) / seconds if seconds else 0.0
            self.residual = residual[-1:]
            yield PromptProgress(last, n_prompt, 1e3 * seconds, rate)

    def _checkpoint_marks(self) -> dict[int, bool]:
        """Positions of the prompt at which to take a checkpoint, and whether it is the root: where prompts part.

        That is at the last turn start, so that another answer or the next turn can come back before its header, and at
        the one before, for another message in place of this one (in a prompt without turns at the last token, so that
        the same prompt can); shortly before, as a chat that is quoted in a message grows there; where this prompt left
        what was held; and, when reading from 0, behind the system prompt and shortly before its end, where dates stand.
        """
        options, start, prompt = self.engine.options, self.engine.turn_start_id, self.request.prompt
        if not self.request.checkpoint or not options.prompt_cache:
            return {}
        turns = np.flatnonzero(prompt == start) if start is not None else np.empty(0, np.int64)
        later = [int(turn) for turn in turns if turn > 0]
        marks = dict.fromkeys(later[-2:] or [len(prompt) - 1], False)
        if not self.n_reused and later:
            marks[later[0]] = later[0] >= options.prompt_cache_root
        if not self.cache.shape.folds_nothing:  # else it is cut anywhere
            guesses = (later[0] - BEFORE_END if later else 0, max(marks) - BEFORE_END)
            for place, least in ((self.resumed.diverged_at, NEAR), *((guess, 2 * NEAR) for guess in guesses)):
                if place - max([self.n_reused, *(mark for mark in marks if mark < place)]) > least:
                    marks.setdefault(place, False)
        return marks

    def _is_periodic(self, first: int, last: int) -> bool:
        every = self.engine.options.prompt_cache_every
        return first // every < last // every

    def _checkpoint(self, *, root: bool) -> None:
        if self.request.checkpoint and self.engine.options.prompt_cache and self.cache.n_tokens:
            self.resumed.timeline.checkpoints.add(self.cache.capture(), self.session.tick(), root=root)

    def _fill_draft(self, residual, next_ids: np.ndarray, first_cell: int):
        return self.session.fill_draft(self.resumed.timeline, residual, next_ids, first_cell)

    # --- the answer

    def _answer(self) -> Iterator[int]:
        """Tokens until one ends the answer or the request; the last one emitted is never consumed."""
        residual = self.residual
        if not self.request.max_new:
            self.finish = "length"
            return
        yield from self._emit(self._choices(self.model.logits(residual), []))
        first_cell = self.cache.n_tokens - 1
        while not self.finish:
            if self.stopped():
                self.finish = "cancel"
                break
            pending = self.context[self.n_context - 1 : self.n_context].copy()
            drafts = self._drafts(residual, first_cell)
            window = self.model.speculate(self.cache, np.concatenate([pending, drafts]))
            first_cell = self.cache.n_tokens
            tokens = self._choices(self.model.logits(window.residual), drafts)
            self.model.commit(self.cache, window, len(tokens))
            self.engine.tokens_read(len(tokens))
            self.n_drafts_offered += len(drafts)
            self.n_drafts_accepted += len(tokens) - 1
            residual = window.residual[: len(tokens)]
            yield from self._emit(tokens)
        self._fill_draft(residual, self._successors(residual), first_cell)

    def _choices(self, logits, drafts) -> list[int]:
        """The tokens that follow: the choice after each row, as long as the drafts before it were chosen themselves."""
        tokens: list[int] = []
        greedy = self.request.sampling.greedy
        rows = self.model.ops.greedy(logits) if greedy else self.model.ops.to_host(logits)
        for row in range(len(rows)):
            at = self.n_context + row
            sampling = self.request.sampling
            token = int(rows[row]) if greedy else next_token(rows[row], self.context[:at], sampling, self.seed)
            if token < 0:
                raise NotFinite
            self.context[at] = token
            tokens.append(token)
            done = token in self.stop_ids or at + 1 - len(self.request.prompt) >= self.request.max_new
            if done or row >= len(drafts) or token != drafts[row]:
                return tokens
        return tokens

    def _emit(self, tokens: list[int]) -> Iterator[int]:
        for token in tokens:
            self.n_context += 1
            if token in self.stop_ids:
                self.finish = "stop"
            elif self.n_generated >= self.request.max_new:
                self.finish = "length"
            yield token

    def _successors(self, residual) -> np.ndarray:
        """The tokens emitted after each row of the latest window."""
        return self.context[self.n_context - residual.shape[0] : self.n_context]

    def _drafts(self, residual, first_cell: int) -> np.ndarray:
        """Fill the draft layer's cells of the last window, then guess on from the last one."""
        rows = self._fill_draft(residual, self._successors(residual), first_cell)
        n_most, cell = self.request.max_new - self.n_generated - 1, first_cell + residual.shape[0]
        return self.session.drafter.guess(self.context[: self.n_context], n_most, self.cache, rows, cell)
