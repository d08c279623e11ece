"""What is let in: the checks in front of every route, request bodies, and how a refusal is answered.

Owns Host, API key, Content-Type, Origin and CORS, reading bodies, and the JSON of errors. Refuses to know what the
routes do. Invariant: the checks come in one order, and a refusal is a JSON error that leaves the connection usable.

Read next: ``httpfront.py``, the routes behind this.
"""

import contextlib
import hmac
import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from httpfields import ApiError, json_bytes, parse_object
from options import OptionRefused

OPEN_PATHS = ("/", "/health", "/v1/health")
PATHS_WITHOUT_BODY = ("/load", "/unload")
# Failures of which a second try may be better; clients try others again too, a save three times.
WORTH_A_RETRY = (408, 409, 429, 500, 502, 503, 504)
SMALL_BODY_BYTES = 1 << 20
CROWD_RETRY_S = 5
KEY_VARIABLE = "STRATA_API_KEY"
MAX_KEY_BYTES = 4096
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", re.ASCII)
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True)
class Access:
    """Who may ask: ``host`` is the address listened on; an ``api_key`` of None means everyone on this machine."""

    host: str = "127.0.0.1"
    api_key: str | None = None
    trusted_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    @classmethod
    def from_flags(cls, host: str, key: str | None, origins: str | None, hosts: str | None) -> "Access":
        """What the options say, lists with commas between; raises OptionRefused."""
        trusted = tuple(map(_origin, _parts("--trusted-origin", origins)))
        return cls(host, key, trusted, tuple(_parts("--allowed-host", hosts)))


def find_key(key: str | None, file: str | None) -> str | None:
    """The API key of ``--api-key``, ``--api-key-file`` or the environment, in this order; raises OptionRefused."""
    if key is not None and file is not None:
        raise OptionRefused("--api-key and --api-key-file: give one of them")
    if key is not None:
        return _key("--api-key", key)
    if file is not None:
        return _key("--api-key-file", _key_in(file))
    variable = os.environ.get(KEY_VARIABLE)
    return None if variable is None else _key(KEY_VARIABLE, variable)


def _key_in(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise OptionRefused(f"--api-key-file: {path!r} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_KEY_BYTES:
        raise OptionRefused(f"--api-key-file: {path!r} is larger than {MAX_KEY_BYTES} bytes")
    return raw.decode("latin-1").strip()


def _key(where: str, key: str) -> str:
    if not key:
        raise OptionRefused(f"{where}: there is no key in it")
    if not re.fullmatch(r"[!-~]+", key):
        raise OptionRefused(f"{where}: only printable ASCII without blanks can be sent in a header")
    return key


def _parts(flag: str, text: str | None) -> list[str]:
    parts = [part.strip() for part in (text or "").split(",")] if text else []
    if not all(parts):
        raise OptionRefused(f"{flag}: {text!r} has an empty part")
    return parts


def _origin(text: str) -> str:
    if not re.fullmatch(r"https?://[^/\s?#@]+", text):
        raise OptionRefused(f"--trusted-origin: {text!r} is not like https://example.org: no path, no slash at the end")
    return text.lower()


class Guard:
    """ASGI middleware: Host, API key, Content-Type, Origin, in this order; CORS headers for trusted origins."""

    def __init__(self, app, access: Access):
        self._app = app
        self._access = access

    async def __call__(self, scope, receive, send) -> None:
        headers = Headers(scope=scope)
        cors = self._cors_headers(headers)

        async def send_with_cors(message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(cors)
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_cors)
            return
        if scope["method"] == "OPTIONS":
            response = Response(status_code=204, headers={"Allow": "GET, HEAD, POST, DELETE, OPTIONS"})
            await response(scope, receive, send_with_cors)
            return
        await self._app(scope, receive, send_with_cors)

    def _check(self, scope, headers: Headers) -> None:
        access, method, path = self._access, scope["method"], scope["path"]
        if {"content-length", "transfer-encoding"} <= set(headers.keys()):
            # Whoever is in front of us may have read the other of the two: what follows cannot be told apart.
            text = "send Content-Length or Transfer-Encoding, not both"
            raise ApiError(400, text, headers={"Connection": "close"})
        if access.api_key is None and not _host_allowed(headers.get("host", ""), access):
            raise ApiError(403, f"this Host is not served: {headers.get('host', '')[:200]!r}; see --allowed-host")
        if method != "OPTIONS" and path not in OPEN_PATHS and not _key_given(headers, access.api_key):
            advice = "give the API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, advice, "authentication_error", headers={"WWW-Authenticate": "Bearer"})
        if method == "POST" and not _content_type_fits(scope, headers):
            raise ApiError(415, "send the body with 'Content-Type: application/json'")
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, headers) and origin not in access.trusted_origins:
            raise ApiError(403, f"requests from {origin[:200]!r} are not served; see --trusted-origin")

    def _cors_headers(self, headers: Headers) -> dict[str, str]:
        """The same on preflight, answer and stream; none for other origins, and for the own one none are needed."""
        if not self._access.trusted_origins:
            return {}
        origin = headers.get("origin")
        if origin not in self._access.trusted_origins:
            return {"Vary": "Origin"}
        asked = headers.get("access-control-request-headers", "").split(",")
        allowed = ["Authorization", "Content-Type", "X-API-Key"]
        allowed += [name.strip() for name in asked if name.strip().title() not in [*map(str.title, allowed), ""]]
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": ", ".join(allowed),
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }


def _host_allowed(host: str, access: Access) -> bool:
    """Names that only this machine has; a page of another site whose name was bent to this address has its own."""
    if not HOST.fullmatch(host):
        return False
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    names = {*LOOPBACK_NAMES, access.host.lower(), *map(str.lower, access.allowed_hosts)}
    return name in names or host.lower() in names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _key_given(headers: Headers, key: str | None) -> bool:
    if key is None:
        return True
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
    # Each comparison takes the same time wherever the first difference is.
    return any([hmac.compare_digest(one.encode(), key.encode()) for one in given])


def _content_type_fits(scope, headers: Headers) -> bool:
    if headers.get("content-type", "").lower().startswith("application/json"):
        return True
    if scope["path"] in PATHS_WITHOUT_BODY:
        return True
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return empty and "content-type" not in headers and b"action=erase" in scope["query_string"].split(b"&")


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether a page was loaded from here; a proxy in front may speak TLS, so the scheme says nothing."""
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == headers.get("host", "").lower()


# --- Bodies and refusals ---


class Json(JSONResponse):
    """JSON as it is, with whatever cannot be written as UTF-8 replaced."""

    def render(self, content) -> bytes:
        return json_bytes(content)


def error_response(error: ApiError) -> Response:
    return Json(error.body, error.status, retry_headers(error))


def retry_headers(error: ApiError) -> dict[str, str]:
    """The headers of a refusal; clients that try again by themselves are told where that cannot help."""
    final = {} if error.status in WORTH_A_RETRY else {"x-should-retry": "false"}
    return final | (error.headers or {})


async def read_object(request: Request, limit_bytes: int, *, unique: bool = False) -> dict:
    """The JSON object in a small body; ``unique`` refuses a key that is given twice. Raises ApiError."""
    return parse_object(await read_body(request, limit_bytes), unique=unique)


class BodyRoom:
    """Memory for all large bodies together, those on their way and those at work; small ones always find some."""

    def __init__(self, most_bytes: int):
        self._n_left = most_bytes

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes what a body of so many bytes needs, for this block; it raises ApiError."""
        n_taken = 0

        def hold(n_bytes: int) -> None:
            nonlocal n_taken
            n_more = max(0, n_bytes - SMALL_BODY_BYTES) - n_taken
            if n_more > self._n_left:
                text = "there are too many large bodies at once"
                raise ApiError(503, text, headers={"Retry-After": str(CROWD_RETRY_S)})
            self._n_left, n_taken = self._n_left - n_more, n_taken + n_more

        try:
            yield hold
        finally:
            self._n_left += n_taken


async def read_body(request: Request, limit_bytes: int, hold: Callable[[int], None] = lambda n_bytes: None) -> bytes:
    """The bytes of a body, whose number is told to ``hold`` as it grows; raises ApiError."""
    too_large = ApiError(413, f"the body is larger than {limit_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit_bytes:
            raise too_large
        hold(len(raw))
    return bytes(raw)
