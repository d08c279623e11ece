"""The index against a plain search: what is found for any prompt, what continues what, and nothing left behind."""

import random

import numpy as np

from given_store import IDENTITY, SHAPE, ids_of, kept
from storeflush import segments_of, state_at
from storeindex import Hit, StoreFile, StoreIndex
from storelayout import Head, Segment, id_bytes, root_key


def file_of(name: str, ids, states=(), *, pick=lambda segment: True, identity=IDENTITY, n_drafted=1 << 30) -> StoreFile:
    what = kept(ids, states, identity=identity, n_drafted=n_drafted)
    segments = tuple(filter(pick, segments_of(what)))
    head = Head(identity, SHAPE, segments, tuple(state_at(what, offer) for offer in what.states))
    return StoreFile(name, head, b"", 1000, 0)


def plain_find(files, ids) -> tuple[int, list[int]]:
    """Tokens held from the start on, and positions of states in them, by comparing all with all."""
    pieces = [(file.whole, piece) for file in files for piece in file.head.segments]
    n_tokens = 0
    while True:
        reach = n_tokens
        for whole, piece in pieces:
            if piece.start != n_tokens // 256 * 256 or not np.array_equal(whole[: piece.start], ids[: piece.start]):
                continue
            mine = ids[piece.start : piece.end]
            same = whole[piece.start : piece.start + len(mine)] == mine
            reach = max(reach, piece.start + (len(mine) if same.all() else int(same.argmin())))
        if reach == n_tokens:
            break
        n_tokens = reach
        if n_tokens % 256:
            break
    positions = {
        state.position
        for file in files
        for state in file.head.states
        if state.position <= n_tokens and np.array_equal(file.whole[: state.position], ids[: state.position])
    }
    return n_tokens, sorted(positions, reverse=True)  # fmt: skip


def random_file(rng: random.Random, name: str, texts) -> StoreFile:
    ids = rng.choice(texts)[: rng.randrange(1, 1100)]
    states = sorted({rng.choice((256, 512, len(ids), rng.randrange(1, len(ids) + 1))) for _ in range(2)})
    states = [position for position in states if position <= len(ids)]
    file = file_of(name, ids, states, pick=lambda segment: rng.random() < 0.7)
    file.whole = ids
    return file


def texts_of(rng: random.Random) -> list[np.ndarray]:
    """Conversations that begin alike for a while."""
    base = ids_of(1100, rng.randrange(1000))
    return [base] + [ids_of(1100, rng.randrange(1000), base[:n]) for n in (0, 100, 256, 300, 700, 1024)]


def test_any_prompt_finds_what_a_plain_search_finds():
    rng = random.Random(1)
    n_partial = 0
    for _ in range(25):
        texts, index, files = texts_of(rng), StoreIndex(), []
        for number in range(8):
            file = random_file(rng, f"f{number}", texts)
            if file.pieces:
                index.add(file)
                files.append(file)
        for _ in range(12):
            prompt = ids_of(1100, rng.randrange(1000), rng.choice(texts)[: rng.randrange(1100)])
            hit = index.find(IDENTITY, prompt)
            assert (hit.n_tokens, [place.piece.position for place in hit.states]) == plain_find(files, prompt)
            n_partial += hit.n_tokens % 256 > 0
            assert [place.piece.start for place in hit.segments] == [256 * i for i in range(len(hit.segments))]
            for place in (*hit.segments, *hit.states):
                assert (
                    place.piece
                    is (place.file.head.segments + place.file.head.states)[
                        place.number + (len(place.file.head.segments) if place in hit.states else 0)
                    ]
                )
        assert index.find(bytes(32), texts[0]).n_tokens == 0
        rng.shuffle(files)
        while files:
            index.remove(files.pop().name)
            prompt = rng.choice(texts)
            hit = index.find(IDENTITY, prompt)
            assert (hit.n_tokens, [place.piece.position for place in hit.states]) == plain_find(files, prompt)
        assert (index._trees, index.files) == ({}, {})
    assert n_partial > 30


def test_identities_do_not_meet():
    index, ids = StoreIndex(), ids_of(600, 1)
    for number in range(3):
        index.add(file_of(str(number), ids[: 200 * (number + 1)], identity=bytes([number]) * 32))
    assert [index.find(bytes([number]) * 32, ids).n_tokens for number in range(4)] == [200, 400, 600, 0]


def test_a_segment_that_claims_another_place_is_not_found():
    """Its parent is right and its number is not: its cells would go where other ones belong."""
    index, ids = StoreIndex(), ids_of(512, 1)
    file = file_of("a", ids)
    first, second = file.head.segments
    file.head = file.head._replace(segments=(first, second._replace(index=5)))
    index.add(file)
    assert index.find(IDENTITY, ids).n_tokens == 256


def test_cells_of_the_draft_layer_are_preferred():
    index, ids = StoreIndex(), ids_of(600, 1)
    index.add(file_of("a", ids))
    index.add(file_of("b", ids, n_drafted=256))
    assert {place.file.name for place in index.find(IDENTITY, ids).segments[1:]} == {"a"}
    assert index.find(IDENTITY, ids).n_drafted == 600
    index.remove("a")
    assert index.find(IDENTITY, ids).n_drafted == 256


def test_what_continues_what():
    ids = ids_of(900, 1)
    first, rest = file_of("first", ids[:300]), file_of("rest", ids, pick=lambda segment: segment.index)
    twin = file_of("twin", ids[:256])
    index = StoreIndex()
    index.add(first)
    assert not index.is_continued(first)
    index.add(rest)
    assert index.is_continued(first)
    assert not index.is_continued(rest)
    assert index.before(rest) == {"first"}
    index.add(twin)
    assert not index.is_continued(first), "another file holds the same"
    index.remove("first")
    assert index.is_continued(twin)
    state = file_of("state", ids[:256], [256], pick=lambda segment: False)
    index.remove("rest")
    index.add(state)
    assert index.is_continued(twin), "by a state"


def test_conversations_are_texts_that_nothing_continues():
    ids, index = ids_of(900, 1), StoreIndex()
    index.add(file_of("a", ids[:700], [700]))
    index.add(file_of("b", ids, [900], pick=lambda segment: segment.end > 512))
    index.add(file_of("c", ids_of(800, 2, ids[:300]), pick=lambda segment: segment.index))
    index.add(file_of("twin", ids_of(800, 2, ids[:300]), pick=lambda segment: segment.index))
    index.add(file_of("d", ids_of(600, 3), pick=lambda segment: segment.index == 1))
    index.add(file_of("e", ids_of(600, 4, ids[:512]), [600]))  # its first segments are continued, its end is not
    found = {c.id: c for c in index.conversations()}
    assert sorted((c.n_tokens, c.is_whole) for c in found.values()) == [
        (512, False), (600, True), (800, True), (900, True),
    ]  # fmt: skip
    assert {file.name for c in found.values() if c.n_tokens == 900 for file in c.files} >= {"a", "b"}
    assert any(np.array_equal(c.ids, ids) for c in found.values())
    assert [len(c.hit.states) for c in found.values() if c.n_tokens == 600] == [1]


# --- cells that another piece has


def ext(ids, n_skipped: int, has_draft: bool = True) -> Segment:
    return Segment(root_key(IDENTITY), 0, id_bytes(ids), has_draft, n_skipped)


def index_of(**files: list[Segment]) -> StoreIndex:
    index = StoreIndex()
    for name, segments in files.items():
        index.add(StoreFile(name, Head(IDENTITY, SHAPE, tuple(segments), ()), b"", 0, 0))
    return index


def test_a_piece_without_its_first_cells_is_found_with_the_one_that_has_them():
    ids = ids_of(256, 1)
    index = index_of(a=[ext(ids[:100], 0)], b=[ext(ids, 100)])
    hit = index.find(IDENTITY, ids)
    assert (hit.n_tokens, [place.file.name for place in hit.segments]) == (256, ["a", "b"])
    assert [place.file.name for place in index.find(IDENTITY, ids[:90]).segments] == ["a"]
    assert index.covered(IDENTITY, ext(ids, 0), ())
    assert not index.covered(IDENTITY, ext(ids, 0), ("a",))
    assert not index.covered(IDENTITY, ext(ids[:100], 0), ("a",))
    assert index.covered(IDENTITY, ext(ids[:160], 100), ("a",))
    assert index.is_continued(index.files["a"])
    assert not index.is_continued(index.files["b"])
    assert index.before(index.files["b"]) == {"a"}


def test_a_piece_whose_first_cells_are_gone_is_worth_nothing():
    ids = ids_of(600, 1)
    behind = Segment(ext(ids[:256], 0).key, 1, id_bytes(ids[256:512]), True)
    index = index_of(a=[ext(ids[:100], 0)], b=[ext(ids[:256], 100), behind])
    assert index.find(IDENTITY, ids).n_tokens == 512
    index.remove("a")
    assert index.find(IDENTITY, ids) == Hit()
    index.add(StoreFile("c", Head(IDENTITY, SHAPE, (ext(ids[:120], 0),), ()), b"", 0, 0))
    assert index.find(IDENTITY, ids).n_tokens == 512


def test_what_begins_a_piece_has_the_draft_layers_cells_where_that_has_them():
    ids = ids_of(256, 1)
    index = index_of(a=[ext(ids[:100], 0, has_draft=False)], b=[ext(ids, 100)])
    assert index.find(IDENTITY, ids).n_tokens == 100
    assert index.beginning(IDENTITY, ext(ids, 0)) == 0
    assert index.beginning(IDENTITY, ext(ids, 0, has_draft=False)) == 100
    other = index_of(a=[ext(ids[:100], 0)], b=[ext(ids, 100, has_draft=False)])
    hit = other.find(IDENTITY, ids)
    assert (hit.n_tokens, hit.n_drafted) == (256, 0)


def test_a_piece_of_the_same_text_is_taken_before_one_that_begins_alike():
    ids = ids_of(256, 1)
    index = index_of(a=[ext(ids_of(200, 2, ids[:100]), 0)], b=[ext(ids[:100], 0)], c=[ext(ids, 100)])
    assert [place.file.name for place in index.find(IDENTITY, ids).segments] == ["b", "c"]
    index.remove("b")
    assert [place.file.name for place in index.find(IDENTITY, ids).segments] == ["a", "c"]
    assert index.beginning(IDENTITY, ext(ids, 0)) == 0, "nothing new is built on another text"
