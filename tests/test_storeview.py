"""A store that is looked into: conversations by their ids, and one taken out while the others stay whole."""

import pytest

import storefolder
from given_store import IDENTITY, check_prompt, flush, ids_of, kept, new_store, position
from storelayout import StoreError
from storeview import StoreView, entry, find

SYSTEM = ids_of(600, 1)
CHATS = {"a": ids_of(900, 2, SYSTEM), "b": ids_of(1200, 3, SYSTEM), "c": ids_of(300, 4)}


@pytest.fixture
def view(tmp_path):
    """Three chats, of which two have a system prompt in common, each kept turn by turn."""
    store = new_store(tmp_path)
    for label, ids in CHATS.items():
        for n_tokens in range(300, len(ids) + 1, 300):
            flush(store, kept(ids[:n_tokens], [n_tokens], label=f"chat {label}", replay=10**6))
    return StoreView(str(tmp_path), [].append)


def held(folder, ids) -> tuple[int, int]:
    """Tokens and position of the deepest state that an engine gets of a chat."""
    return position(check_prompt(new_store(folder), ids))


def by_label(view) -> dict[str, str]:
    return {one.last.file.head.label.removeprefix("chat "): one.id for one in view.conversations()}


def test_what_is_listed(view, monkeypatch):
    entries = {one["id"]: one for one in (entry(one, [IDENTITY.hex()]) for one in view.conversations())}
    for label, name in by_label(view).items():
        assert entries[name] | {"n_bytes": 0, "modified": 0} == {
            "kind": "conversation", "id": name, "label": f"chat {label}", "n_tokens": len(CHATS[label]), "n_bytes": 0,
            "modified": 0, "match": True, "model_match": True, "problem": None,
        }  # fmt: skip
    (one, *_) = view.conversations()
    other = bytes(8) + IDENTITY[8:]
    assert (entry(one, [])["match"], entry(one, [])["model_match"]) == (None, None)
    assert (entry(one, [other.hex()])["match"], entry(one, [other.hex()])["model_match"]) == (False, False)
    same_model = IDENTITY[:8] + bytes(24)
    assert (entry(one, [same_model.hex()])["match"], entry(one, [same_model.hex()])["model_match"]) == (False, True)
    monkeypatch.setattr(storefolder, "file_of", lambda *_: pytest.fail("a head was read twice"))
    assert len(view.conversations()) == 3


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert StoreView(str(tmp_path / "nowhere"), [].append).conversations() == []
    assert not (tmp_path / "nowhere").exists()


def test_an_id_is_found_by_its_first_digits(view):
    everything = view.conversations()
    for one in everything:
        assert find(everything, one.id[:8], "store") is one
    for name in ("", "abc", "x" * 16, everything[0].id + "0"):
        with pytest.raises(StoreError, match="no conversation begins"):
            find(everything, name, "store")


@pytest.mark.parametrize("label", CHATS)
def test_what_is_taken_out_is_gone_and_the_others_stay_whole(label, view):
    before = {other: held(view.folder, ids) for other, ids in CHATS.items()}
    name = by_label(view)[label]
    n_bytes = view.remove(name)
    assert n_bytes > 0
    assert by_label(view).keys() == CHATS.keys() - {label}
    for other, ids in CHATS.items():
        if other != label:
            assert held(view.folder, ids) == before[other] == (len(ids), len(ids))
    n_shared = 0 if label == "c" else 256 * (len(SYSTEM) // 256)
    assert held(view.folder, CHATS[label])[0] in (n_shared, len(SYSTEM) if n_shared else 0)
    for file in storefolder.survey(view.folder)[0].files.values():
        assert file.head.label != f"chat {label}"
        assert not any(CHATS[label][-40:].tobytes() in piece.ids for piece in file.pieces)
    with pytest.raises(StoreError, match="no conversation"):
        view.remove(name)


def test_all_are_taken_out_one_by_one(view):
    for name in by_label(view).values():
        view.remove(name)
    assert view.conversations() == []
    assert list(storefolder.survey(view.folder)[0].files) == []


def test_a_beginning_that_another_one_shares_is_written_anew(tmp_path):
    """The shared tokens lie in one file with those of the chat that goes: these do not stay with them."""
    store = new_store(tmp_path)
    first, second = ids_of(1000, 2, SYSTEM), ids_of(1000, 3, SYSTEM)
    flush(store, kept(first, [600, 1000], root=600, label="first"))
    flush(store, kept(second, [600, 1000], root=600, label="second"))
    view = StoreView(str(tmp_path), [].append)
    (name,) = (one.id for one in view.conversations() if one.last.file.head.label == "first")
    view.remove(name)
    assert held(tmp_path, second) == (1000, 1000)
    assert held(tmp_path, first) == (600, 600), "what both have in common"
    labels = [file.head.label for file in storefolder.survey(str(tmp_path))[0].files.values()]
    assert sorted(labels) == ["", "second"]
