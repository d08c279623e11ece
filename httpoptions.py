"""The HTTP options of ``--serve``, checked.

Owns what each may be, and the key's ways in. Refuses to know the server that they are for. Invariant: options that come
through here can be used, but for the address and the model, which only their use can show.

Read next: ``httpfront.py``, which is started with them.
"""

import os
import re
from dataclasses import dataclass, field

from httpguard import Access, find_key
from options import HttpOptions, OptionRefused
from printable import one_line
from sessionfolder import NameRefused, check_filename, names_at_exit


@dataclass(frozen=True)
class FrontOptions:
    """What the HTTP options of ``--serve`` say, checked."""

    port: int
    model: str
    access: Access = field(default_factory=Access)
    slot_save_path: str | None = None
    store: str | None = None
    restore_at_start: str | None = None
    save_at_exit: str | None = None
    silence_s: float = HttpOptions.engine_silence_s

    @classmethod
    def from_flags(
        cls, model: str, slot_save_path: str | None, flags: HttpOptions, store: str | None = None
    ) -> "FrontOptions":
        """The options as they stand on the command line; raises OptionRefused."""
        if (name := flags.session_restore_at_start) is not None:
            _check_session_flag("--session-restore-at-start", [name], slot_save_path)
        if (name := flags.session_save_at_exit) is not None:
            _check_session_flag("--session-save-at-exit", names_at_exit(name), slot_save_path)
        if slot_save_path and any("\ud800" <= char <= "\udfff" for char in slot_save_path):
            raise OptionRefused("--slot-save-path: the folder's name is not UTF-8")
        host, port = _address(flags.http, flags.host)
        key = find_key(flags.api_key, flags.api_key_file)
        return cls(
            port=port,
            model=model,
            access=Access.from_flags(host, key, flags.trusted_origin, flags.allowed_host),
            slot_save_path=slot_save_path,
            store=store,
            restore_at_start=flags.session_restore_at_start,
            save_at_exit=flags.session_save_at_exit,
            silence_s=flags.engine_silence_s,
        )

    @property
    def model_id(self) -> str:
        """The file's name without its ending and without the number of a part."""
        name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", os.path.basename(self.model), flags=re.IGNORECASE)
        return one_line(name)


def _check_session_flag(flag: str, names: list[str], slot_save_path: str | None) -> None:
    if slot_save_path is None:
        raise OptionRefused(f"{flag} needs --slot-save-path")
    try:
        for name in names:
            check_filename(name)
    except NameRefused as error:
        raise OptionRefused(f"{flag}: {error}") from error


def _address(http: str, host: str | None) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; an IPv6 address stands in brackets."""
    given, _, port = http.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise OptionRefused(f"--http: {http!r} is not [HOST:]PORT with a port from 0 to 65535")
    if given and host:
        raise OptionRefused(f"--http names the host {given!r} and --host {host!r}; give one of them")
    return (given or host or "127.0.0.1").removeprefix("[").removesuffix("]"), int(port)
