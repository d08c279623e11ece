"""Sound session files whose contents do not fit: each is refused by its name, and the live session stays as it was."""

import dataclasses

import numpy as np
import pytest

import sessionstate
from cells import KvHeader
from given_engine import (
    ask,
    ids,
    joined,
    marks,
    new_session,
)
from sessionfile import read_session, verify_session, write_session
from sessionlayout import KvLayer, Limits, SessionError

# --- refused restores: sound files with wrong contents


def image_in(path, session):
    return read_session(str(path), session.engine.identity(), Limits())


def with_record(image, index=None, **changes):
    """The image with changes to the live record, or to checkpoint `index`."""
    if index is None:
        return dataclasses.replace(image, live=dataclasses.replace(image.live, **changes))
    checkpoints = list(image.checkpoints)
    checkpoints[index] = dataclasses.replace(checkpoints[index], **changes)
    return dataclasses.replace(image, checkpoints=checkpoints)


def with_layer(image, index, part=None, **header):
    layers = list(image.kv)
    parts = list(layers[index].parts)
    if part is not None:
        parts[part] = parts[part][:-1]
    layers[index] = KvLayer(layers[index].header._replace(**header), tuple(parts))
    return dataclasses.replace(image, kv=layers)


def with_ids(record, changes):
    changed = record.ids.copy()
    for place, token in changes.items():
        changed[place] = token
    return changed


def with_geometry(image, slot):
    geometry = list(image.geometry)
    geometry[slot] += 1
    return dataclasses.replace(image, geometry=geometry)


ARRAYS = ("gdn", "ple", "tails", "dead", "block_pos")
WRONG = {
    **{f"geometry {slot}": (lambda i, slot=slot: with_geometry(i, slot), "geometry") for slot in range(18)},
    "a layer range from 1": (lambda i: dataclasses.replace(i, layer_lo=1), "layer"),
    "a layer more": (lambda i: dataclasses.replace(i, layer_hi=i.layer_hi + 1), "layer"),
    "no tokens": (lambda i: with_record(i, ids=i.live.ids[:0]), "tokens"),
    "too many tokens": (lambda i: with_record(i, ids=np.resize(i.live.ids, 257)), "limit|count"),
    "a negative token": (lambda i: with_record(i, ids=with_ids(i.live, {3: -1})), "token ids"),
    "a token beyond the vocabulary": (lambda i: with_record(i, ids=with_ids(i.live, {-1: 96})), "token ids"),
    "a picture": (lambda i: with_record(i, images=[(3, 77)]), "pictures"),
    "a picture in a checkpoint": (lambda i: with_record(i, 0, images=[(3, 77)]), "pictures"),
    "an empty checkpoint": (lambda i: with_record(i, 0, ids=i.live.ids[:0]), "checkpoint 0"),
    "a checkpoint of other tokens": (lambda i: with_record(i, 0, ids=with_ids(i.live, {2: 95})[:20]), "checkpoint 0"),
    "a checkpoint beyond the live tokens": (
        lambda i: with_record(i, 0, ids=joined(i.live.ids, 9)),
        "checkpoint 0",
    ),
    **{
        f"a checkpoint's {name} too short": (
            lambda i, name=name: with_record(i, 0, **{name: getattr(i.checkpoints[0], name)[:-1]}),
            f"{name} of checkpoint 0",
        )
        for name in ARRAYS
    },
    **{
        f"a live {name} too short": (
            lambda i, name=name: with_record(i, **{name: getattr(i.live, name)[:-1]}),
            f"{name} of the live state",
        )
        for name in ARRAYS
    },
    **{
        f"a live {name} too long": (
            lambda i, name=name: with_record(i, **{name: np.append(getattr(i.live, name), np.uint8(0))}),
            name,
        )
        for name in ARRAYS
    },
    "a layer of K/V missing": (lambda i: dataclasses.replace(i, kv=i.kv[:1]), "layer count"),
    "no K/V": (lambda i: dataclasses.replace(i, kv=[]), "layer count"),
    "a layer of K/V too many": (lambda i: dataclasses.replace(i, kv=[*i.kv, i.kv[1]]), "K/V layer count|layers"),
    "the layers in another order": (lambda i: dataclasses.replace(i, kv=i.kv[::-1]), "K/V layer"),
    **{
        f"{field} of layer {layer}": (
            lambda i, field=field, layer=layer: with_layer(i, layer, **{field: getattr(i.kv[layer].header, field) + 1}),
            f"K/V layer {layer}",
        )
        for field in KvHeader._fields
        for layer in (0, 1)
    },
    **{
        f"part {part} of layer {layer} too short": (
            lambda i, part=part, layer=layer: with_layer(i, layer, part),
            f"part sizes .* of layer {layer}",
        )
        for layer, parts in ((0, (0, 1, 4)), (1, (0, 1)))
        for part in parts
    },
    "more checkpoints than are kept": (lambda i: dataclasses.replace(i, checkpoints=i.checkpoints * 7), "limit"),
    "computed with a control vector": (lambda i: dataclasses.replace(i, cvec=True), "control vector"),
}


@pytest.mark.parametrize(("change", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_sound_file_whose_contents_do_not_fit_is_refused(change, match, live, refused):
    session, _, good = live
    wrong = good.parent / "wrong.bin"
    write_session(str(wrong), change(image_in(good, session)), session.engine.identity())
    verify_session(str(wrong))
    refused("invalid", match, session.restore, wrong)


# The order of the format: live tokens, checkpoints, live arrays, number of layers, layers.
ORDER = ["a negative token", "an empty checkpoint", "a checkpoint's gdn too short", "a live gdn too short",
         "a layer of K/V missing", "cells of layer 0", "part 0 of layer 0 too short"]  # fmt: skip


@pytest.mark.parametrize("first", range(len(ORDER) - 1))
def test_of_two_faults_the_earlier_one_is_named(first, live):
    session, _, good = live
    image = image_in(good, session)
    for fault in reversed(ORDER[first:]):
        image = WRONG[fault][0](image)
    wrong = good.parent / "wrong.bin"
    write_session(str(wrong), image, session.engine.identity())
    with pytest.raises(SessionError, match=WRONG[ORDER[first]][1]):
        session.restore(str(wrong))


@pytest.mark.parametrize("identity", ["model", "config"])
def test_a_file_of_this_shape_but_another_identity_is_refused(identity, live, refused):
    session, _, good = live
    own = session.engine.identity()
    wrong = good.parent / "wrong.bin"
    write_session(str(wrong), image_in(good, session), own._replace(**{identity: getattr(own, identity) ^ 1}))
    refused("invalid", identity, session.restore, wrong)


def test_a_file_of_several_checkpoints_gives_them_all(live):
    session, prompt, good = live
    image = image_in(good, session)
    records = [sessionstate._record(c.snapshot.ids, c.snapshot.arrays, c.used) for c in session.checkpoints.chain]
    assert len(records) == 2
    write_session(str(good), dataclasses.replace(image, checkpoints=records), session.engine.identity())
    restored = new_session()
    restored.restore(str(good))
    assert marks(restored) == marks(session)
    other = joined(prompt[: marks(session)[0] + 1], ids(10, 70))
    answers = [ask(s, other, 6) for s in (restored, session)]
    assert answers[0].reused == marks(session)[0]
    assert answers[0].tokens == answers[1].tokens


def test_the_greatest_stamp_a_file_can_hold_does_no_harm(live):
    session, prompt, good = live
    image = with_record(with_record(image_in(good, session), used=2**64 - 1), 0, used=2**64 - 1)
    write_session(str(good), image, session.engine.identity())
    session.restore(str(good))
    ask(session, prompt, 5)
    n_held = session.n_tokens
    session.save(str(good))
    assert new_session().restore(str(good)).n_tokens == n_held
