"""A live conversation, a file of another one, and what must hold of both after whatever fails."""

import pytest

from engine import Session
from given_engine import TURN, ask, held, ids, joined, new_session, next_turn, tree, trunk
from sessionlayout import SessionError

MODEL = "qwen4exp"  # of every kind of layer: recurrent, indexed, n-gram history, drafts


def refusal_of(operation) -> SessionError | None:
    """What an operation was refused with; every other exception passes through."""
    try:
        operation()
    except SessionError as error:
        return error
    return None


class Live:
    """A session that holds one conversation, a file of another one, and what a control run answers next."""

    def __init__(self, folder):
        self.folder = folder
        self.chat, self.spare = folder / "chat.bin", folder.parent / "spare.bin"
        other = new_session(MODEL)
        ask(other, ids(25, 7), 5)
        other.save(str(self.chat))
        self.old = self.chat.read_bytes()
        self.restored = held(other)["live"]
        self.session = new_session(MODEL)
        self.prompt = joined(TURN, ids(29))
        self.prompt = next_turn(self.prompt, ask(self.session, self.prompt, 5), 1)
        self.session.save(str(self.spare))
        self.new = self.spare.read_bytes()
        self.expected = self._answer(new_session(MODEL))
        self.reset()

    def _answer(self, session) -> tuple:
        reply = ask(session, self.prompt, 4)
        return reply.tokens, held(session)["live"]

    def reset(self, session=None) -> None:
        """The conversation live again, as a save left it, and the older file in the folder."""
        self.session = session or self.session
        self.session.restore(str(self.spare))
        for path in self.folder.iterdir():
            path.unlink()
        self.chat.write_bytes(self.old)

    def attempt(self, operation) -> SessionError | None:
        """Run an operation and hold what it left against what it said: a refusal changes nothing at all."""
        before, files = held(self.session), tree(self.folder)
        error = refusal_of(operation)
        if error:
            assert tree(self.folder) == (files | {"chat.bin": self.new} if error.published else files)
            self.goes_on(before)
        return error

    def goes_on(self, before) -> None:
        """Nothing that is held has changed, and the next turn is that of the control run."""
        now, n_held = held(self.session), self.session.n_tokens
        assert [name for name in before if now[name] != before[name]] == []
        tokens, state = self._answer(self.session)
        assert tokens == self.expected[0]
        is_same = state == self.expected[1]  # apart, as to explain a difference of whole states takes minutes
        assert is_same
        assert self.session.stats()["counters"]["hits"] >= 1
        assert n_held == len(before["live"][1])
        self.session.restore(str(self.spare))

    def save(self, **named):
        self.session.save(str(self.chat), **named)

    def restore(self, **named):
        self.session.restore(str(self.chat), **named)


def talk(session, turns=2, n=30, seed=0, max_new=7):
    """Hold a conversation of some turns; returns the prompt of the turn behind it."""
    prompt = joined(TURN, ids(n - 1, seed))
    for turn in range(turns):
        prompt = next_turn(prompt, ask(session, prompt, max_new), seed + turn + 1)
    return prompt


def refusing(live):
    """Asserts that an operation of a live session is refused and that nothing came of it, to the last byte."""
    session, prompt, good = live
    control = Session(session.engine)
    expected = ask(control, prompt, 12)

    def check(kind, match, operation, *arguments, folder=None):
        folder = folder or good.parent
        before, files = held(session), tree(folder)
        with pytest.raises(SessionError, match=match) as caught:
            operation(*map(str, arguments))
        assert (caught.value.kind, caught.value.published) == (kind, False)
        assert held(session) == before
        assert tree(folder) == files
        n_held = session.n_tokens
        reply = ask(session, prompt, 12)
        assert (reply.tokens, reply.reused) == (expected.tokens, n_held)
        assert trunk(session) == trunk(control)

    return check
