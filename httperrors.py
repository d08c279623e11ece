"""What a client is told when its request fails: status, headers and words for every error of the front.

It owns that mapping; it knows no route. Invariant: every failure has an answer of its own, and one that a client would
repeat in vain says so. Read next: httproutes.py, which has these handlers.
"""

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from httpfields import ApiError
from httpguard import error_response
from httplines import (
    Busy,
    ChildError,
    Ending,
    EngineRefused,
    FileGone,
    FileThere,
    GivenUp,
    ModelChanged,
    NotLoaded,
    RequestFailed,
    SessionRefused,
)

# What a request that came too early is told to wait, in whole seconds.
RETRY_AFTER_S = 5
LATER = {"Retry-After": str(RETRY_AFTER_S)}
# For failures that a client would try again by itself, to the same end.
NEVER = {"x-should-retry": "false"}
SESSION_STATUS = {"invalid": 400, "storage": 507, "memory": 503, "io": 500}


def api_error(error: ChildError) -> ApiError:
    """What a client is told when the child brought no result."""
    if isinstance(error, SessionRefused):
        extra = {"published": True} if error.published else {}
        headers = LATER if error.kind == "memory" else NEVER
        return ApiError(SESSION_STATUS[error.kind], str(error), headers=headers, kind=error.kind, **extra)
    if isinstance(error, NotLoaded | Ending | ModelChanged):
        return too_early(str(error))
    if isinstance(error, Busy):
        return ApiError(409, str(error), headers=LATER)
    if isinstance(error, FileGone):
        return ApiError(404, str(error))
    if isinstance(error, FileThere):
        return ApiError(409, str(error), headers=NEVER)
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), headers=NEVER)
    return ApiError(400 if isinstance(error, EngineRefused | GivenUp) else 500, str(error))


def too_early(text: str) -> ApiError:
    return ApiError(503, text, headers=LATER)


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_child_error(request: Request, error: ChildError) -> Response:
    return error_response(api_error(error))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:200]
    texts = {404: f"there is no {path!r}", 405: f"{request.method} is not possible on {path!r}"}
    text = texts.get(error.status_code, error.detail)
    return error_response(ApiError(error.status_code, text, headers=error.headers))


async def _on_hang_up(request: Request, error: ClientDisconnect) -> Response:
    return error_response(ApiError(400, "the client hung up in the middle of its request"))


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server failed in this request; its log says where", headers=NEVER))


HANDLERS = {
    ApiError: _on_api_error,
    ChildError: _on_child_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_hang_up,
    Exception: _on_fault,
}
