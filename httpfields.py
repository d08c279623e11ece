"""Single fields of a request's body: the type each must have, and the error that names one which cannot be used.

Owns the errors of the HTTP side and the checks of one value; refuses to know what any field is for. Invariant: whatever
JSON can hold, a value passes its check or is refused by the name of its field; numbers are compared before they are
converted, as JSON knows numbers that no float can hold.

Read next: ``httpchat.py``, which reads whole bodies with this.
"""

import json

from printable import one_line


class ApiError(Exception):
    """A request that is refused: status, text and type of the error body, and further fields of it.

    The text is one line of a bounded length, whoever wrote it.
    """

    def __init__(self, status: int, message: str, category: str = "", headers: dict[str, str] | None = None, **extra):
        message = one_line(message)
        super().__init__(message)
        self.status = status
        self.headers = headers
        category = category or ("invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"code": status, "message": message, "type": category, **extra}}


class BadField(ApiError):
    """A field of the body that cannot be used."""

    def __init__(self, name: str, text: str):
        super().__init__(400, f"{name}: {text}", param=name)


def parse_object(raw: bytes, *, unique: bool = False) -> dict:
    """A JSON object; raises ApiError for anything else, however deep or strange."""

    def pairs_to_dict(pairs: list[tuple[str, object]]) -> dict:
        values = dict(pairs)
        if unique and len(values) < len(pairs):
            raise ValueError("a key is given twice")
        return values

    def refuse(word: str):
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs_to_dict, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def json_bytes(content) -> bytes:
    """JSON as it is on the wire: UTF-8, with whatever cannot be written so replaced, and each object on one line."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    # Plain in JSON, but many readers of lines end one there; JSON itself escapes the others that they know.
    text = text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", "replace")


def optional(body: dict, name: str, kind: type, default):
    """The value of a field; null is as good as absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        wanted = {dict: "an object", bool: "true or false", str: "a text", list: "a list"}[kind]
        raise BadField(name, f"expected {wanted}, found {shown(value)}")
    return value


def whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number, which JSON may write with a point."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise BadField(name, f"{shown(value)} is not a whole number from {low} to {high}")
    return value


def number(name: str, value: object, low: float, high: float) -> float:
    """A finite number; minus zero comes out as zero."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadField(name, f"{shown(value)} is not a number from {low:g} to {high:g}")
    return float(value) + 0.0


def shown(value: object) -> str:
    """A value in an error text: short, whatever it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value[:40] if isinstance(value, str) else value)[:40]
