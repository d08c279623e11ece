"""The HTTP front: the order in which a server starts and ends, and what all its routes share.

Owns the child, the text side of the model and the folder of saved sessions; refuses to know arrays, file layouts and
the engine in its own process: that is a child behind ``httpchild``. Invariant: the routes answer from the first moment
to the last, and what is held is saved, where that was asked for, before the child ends.

Read next: ``httproutes.py`` for what is answered, ``httpchild.py`` for the child, ``sessionfolder.py`` for saved files.
"""

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Sequence

import httpchat
from httpchild import EngineChild
from httplines import ChildError, EngineGone, FileGone, FileThere, ModelChanged, SessionRefused
from httpmodel import FileState, file_state, read_text
from httpoptions import FrontOptions
from httproutes import Routes
from httpserver import FrontError, FrontServer, Terminal, listen
from httpsignals import Patience, heard_by_thread
from httptexts import TextPool
from printable import one_line
from sessionfolder import SessionFolder, names_at_exit
from storeview import StoreView
from tokenizer import Tokenizer, TokenizerError
from verbs import SessionDone

# Threads that still work when all else has ended are left behind after so long.
LAST_THREADS_S = 10.0
# Below the 90 s that systemd waits; a save that is not done by then is given up, and the old file stays.
EXIT_GRACE_S = 80.0


# --- Starting and ending ---


def serve(options: FrontOptions, command: Sequence[str], terminal: "Terminal | None" = None) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status; ``command`` starts the engine child.

    Raises FrontError when the address or the model cannot be used.
    """
    try:
        listener = listen(options.access.host, options.port)
    except OSError as error:
        where = f"{options.access.host}:{options.port}"
        raise FrontError(f"cannot listen on {where}: {error.strerror or error}; choose another --http") from error
    with contextlib.ExitStack() as last:
        return asyncio.run(_serve(options, command, listener, terminal or Terminal(), last))


async def _serve(
    options: FrontOptions,
    command: Sequence[str],
    listener: socket.socket,
    terminal: Terminal,
    last: contextlib.ExitStack,
) -> int:
    """``last`` is closed when the loop and its threads have ended."""
    front = Front(options, command, terminal)
    server = FrontServer(front)
    loop = asyncio.get_running_loop()
    patience = Patience(lambda: loop.call_soon_threadsafe(server.end), front.child.kill_process)
    last.enter_context(heard_by_thread((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), patience.heard))
    address, port = listener.getsockname()[:2]
    terminal.log(f"listening on http://{f'[{address}]' if ':' in address else address}:{port}")
    if options.access.api_key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        terminal.log("whoever reaches this address may use the server, as there is no --api-key")
    starter = asyncio.create_task(server.start_front())
    await server.serve(sockets=[listener])
    starter.cancel()
    await asyncio.gather(starter, return_exceptions=True)
    await front.close()
    last.callback(patience.leave_within(LAST_THREADS_S).cancel)
    if server.failure:
        raise server.failure
    return 0


class Front:
    """What the routes share: the child, the tokenizer, the folder of saved sessions."""

    def __init__(self, options: FrontOptions, command: Sequence[str], terminal: Terminal):
        self.options, self.log = options, terminal.log
        self.tokenizer: Tokenizer | None = None
        self._model_file: FileState | None = None  # what the tokenizer was read from
        self._reading_text = asyncio.Lock()
        self._restore_refused = False
        self.ready = False
        self.closing: asyncio.Future | None = None
        # Whether the texts of what is held, and of what the store keeps, have still to be learned.
        self.restored = self.unread_store = False
        self.child = EngineChild(
            command,
            silence_s=options.silence_s,
            log=terminal.log,
            watch=terminal.watch,
            identify=lambda: file_state(options.model),
            loaded=self._follow_model,
        )
        self.folder = SessionFolder(options.slot_save_path) if options.slot_save_path else None
        self.store = StoreView(options.store, terminal.log) if options.store else None
        self.texts = TextPool(terminal.log)
        self._routes = Routes(self)
        self.app = self._routes.app

    async def start(self) -> None:
        """Load the tokenizer and the engine, restore if asked; raises TokenizerError or ChildError."""
        await asyncio.gather(self.read_text(), self.child.load())
        if self.options.restore_at_start:
            await self._restore_at_start(self.options.restore_at_start)
        self.ready = True
        self._routes.begin_learning()  # a store may have much to tell, and the first prompt should not wait for it

    async def read_text(self) -> None:
        """Have the tokenizer and the template of the model file as it is now; raises EngineGone where there is none."""
        path = self.options.model
        async with self._reading_text:
            if self.tokenizer and await asyncio.to_thread(file_state, path) == self._model_file:
                return
            try:
                tokenizer, file = await asyncio.to_thread(read_text, path)
            except TokenizerError as error:
                raise EngineGone(one_line(str(error))) from error
            for line in [*tokenizer.guesses, *httpchat.model_defaults(tokenizer.sampling)[1]]:
                self.log(line)
            await self.texts.start(tokenizer)
            self.unread_store = self.store is not None
            self.tokenizer, self._model_file = tokenizer, file

    async def _follow_model(self, loaded: FileState | None) -> None:
        """An engine has loaded this state of the file: texts are read and written with what belongs to it."""
        if self.tokenizer is None or loaded != self._model_file:
            await self.read_text()
        if loaded != self._model_file:
            raise EngineGone("the model file was replaced while it was loaded")

    @property
    def store_identities(self) -> list[str]:
        """What the conversations of the store that the engine can resume have, in hex, as it last said."""
        return self.child.info.get("store", "").split(",") if self.child.info.get("store") else []

    def file_of(self, tokenizer: Tokenizer) -> FileState | None:
        """The state of the model file for which this tokenizer's ids are; raises ModelChanged for one of the past."""
        if tokenizer is not self.tokenizer:
            raise ModelChanged("the model file was replaced meanwhile: send the request again")
        return self._model_file

    async def _restore_at_start(self, name: str) -> None:
        """Restore, or say why not: a server without its old conversation is better than none."""
        if not self.folder.holds(name):
            self.log(f"nothing to restore: there is no {name!r} yet")
            return
        try:
            await self.run_session("restore", name)
        except ChildError as error:
            self._restore_refused = True
            self.log(f"{name!r} was not restored: {error}")
        if self.child.state != "ready":
            await self.child.load()

    async def close(self) -> None:
        """Stop the running answer, save if asked, end the child; any number of calls do it once."""
        if self.closing is None:
            self.closing = asyncio.ensure_future(self._close())
        await self.closing

    async def _close(self) -> None:
        self.texts.kill()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                await self.child.close(self._save_at_exit if self.options.save_at_exit else None)
        except TimeoutError:
            self.child.kill()
            self.log(f"the engine was not done after {EXIT_GRACE_S:g} s and was ended")
        except ChildError as error:
            self.log(f"not saved at exit: {error}")
        await self.texts.close()

    async def _save_at_exit(self) -> None:
        """Save to the first name whose file the conversation continues, or that is free."""
        name = self.options.save_at_exit
        # The file that could not be used this time may be worth more than what was talked about since.
        refused = self._restore_refused and name == self.options.restore_at_start
        names = names_at_exit(name)[1 if refused else 0 :]
        for tried, last in zip(names, [*[False] * (len(names) - 1), True], strict=True):
            try:
                done = await self.child.autosave(tried, self.folder.path_of(tried))
            except SessionRefused as error:
                if last or error.kind != "invalid" or not self.folder.holds(tried):
                    raise
                self.log(f"{tried!r} is left as it is: {error}")
                continue
            self._say_done("save", tried, done)
            return

    def _say_done(self, action: str, name: str, done: SessionDone) -> None:
        size_mib, seconds = done.size_bytes / (1 << 20), done.ms / 1000
        self.log(f"{action} {name!r}: {done.n_tokens} tokens, {size_mib:.1f} MiB in {seconds:.2f} s")

    async def run_session(
        self, action: str, name: str, given_up: asyncio.Event | None = None, *, keeps: bool = False
    ) -> SessionDone:
        """Save or restore; ``keeps`` refuses to save over a file that is there when the turn has come."""

        def refusal() -> ChildError | None:
            if action == "restore" and not self.folder.holds(name):
                return FileGone(f"there is no session file {name!r} any more")
            if keeps and self.folder.holds(name):
                return FileThere(f"there is a session file {name!r} already")
            return None

        try:
            done = await self.child.run_session(action, name, self.folder.path_of(name), given_up, refusal)
        except SessionRefused as error:
            raise refusal() or error from error
        self._say_done(action, name, done)
        self.restored |= action == "restore"
        return done
