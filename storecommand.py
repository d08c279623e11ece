"""What `strata store` shows and does: conversations of a store in a table or as JSON, every byte proved, files pruned.

It owns the lines and the order of the commands; it knows no layout and no engine. Invariant: `list` and `verify` change
nothing in the folder. Read next: storefolder.py.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

from blockfile import Progress
from printable import local_time, one_line
from storefile import StoreReader
from storefolder import MIB, Store, survey
from storeindex import Conversation
from storelayout import StoreError


def list_conversations(folder: str, *, as_json: bool) -> bool:
    """One line for each conversation, last used first; False if a head was damaged. Raises StoreError."""
    index, refusals = survey(folder)
    conversations = index.conversations()
    if as_json:
        for conversation in conversations:
            print(json.dumps(_as_dict(conversation)))
    elif conversations:
        _print_table(conversations)
    for error in refusals:
        print(json.dumps(_refusal(error)) if as_json else one_line(f"refused ({error.kind}): {error}"))
    if not as_json:
        n_bytes = sum(file.size_bytes for file in index.files.values())
        print(f"{len(conversations)} conversations in {len(index.files)} files, {n_bytes} bytes", flush=True)
    return not refusals


def _as_dict(conversation: Conversation) -> dict:
    file = conversation.last.file
    return {
        "id": conversation.id,
        "file": file.name,
        "ok": True,
        "label": file.head.label,
        "n_tokens": conversation.n_tokens,
        "whole": conversation.is_whole,
        "states": [place.piece.position for place in conversation.hit.states],
        "size_bytes": file.size_bytes,
        "chain_bytes": conversation.size_bytes,
        "used_s": file.used_ns / 1e9,
        "identity": file.head.identity.hex(),
    }


def _refusal(error: StoreError) -> dict:
    return {
        "file": error.path, "ok": False, "kind": error.kind, "reason": error.reason, "part": error.part,
        "message": str(error),
    }  # fmt: skip


def _print_table(conversations: list[Conversation]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title, justify, width in (("id", "left", 16), ("tokens", "right", 7), ("MiB", "right", 8),
                                  ("last use", "left", 19), ("label", "left", None)):  # fmt: skip
        table.add_column(title, justify=justify, min_width=width, no_wrap=True)
    for conversation in conversations:
        n_mib = conversation.size_bytes / MIB
        used = local_time(conversation.last.file.used_ns / 1e9)
        tokens = f"{conversation.n_tokens}" + ("" if conversation.is_whole else " (in parts)")
        table.add_row(conversation.id, tokens, f"{n_mib:.1f}", used, Text(one_line(conversation.last.file.head.label)))
    Console(highlight=False, width=max(100, shutil.get_terminal_size().columns)).print(table)


def require_folder(folder: str) -> None:
    """Raise StoreError where there is no such folder: a store would make one."""
    if not os.path.isdir(folder):
        raise StoreError("io", "gone", folder, "there is no such folder")


Reporting = Callable[[str], AbstractContextManager[Progress | None]]


def verify_files(folder: str, *, as_json: bool, reporting: Reporting) -> bool:
    """Read every byte of every file and say what that proved; whether all are sound. Raises StoreError."""
    index, refusals = survey(folder)
    for file in index.files.values():
        path = os.path.join(folder, file.name)
        try:
            with reporting(path) as progress, StoreReader(path, file.hash) as reader:
                reader.verify(progress)
        except StoreError as error:
            if error.reason != "gone":
                refusals.append(error)
        else:
            n_segments, n_states = len(file.head.segments), len(file.head.states)
            if as_json:
                facts = {"file": path, "ok": True, "size_bytes": file.size_bytes, "segments": n_segments}
                print(json.dumps(facts | {"states": n_states, "identity": file.head.identity.hex()}), flush=True)
            else:
                what = f"{n_segments} segments and {n_states} states in {file.size_bytes} bytes"
                print(one_line(f"{path}: sound. {what}; table hash, checksums and end mark agree."), flush=True)
    for error in refusals:
        print(json.dumps(_refusal(error)) if as_json else one_line(f"refused ({error.kind}): {error}"), flush=True)
    return not refusals


def prune(folder: str, store_mib: int, *, as_json: bool, log: Callable[[str], None]) -> None:
    """Set damaged files aside, remove them, and what is over the quota, as an engine would. Raises StoreError."""
    require_folder(folder)
    n_files, n_bytes = Store(folder, store_mib * MIB, 0, log).prune()
    if as_json:
        print(json.dumps({"removed_files": n_files, "removed_bytes": n_bytes}), flush=True)
    else:
        print(f"{n_files} files removed, {n_bytes} bytes", flush=True)
