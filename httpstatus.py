"""The state of the engine child as clients see it: the slot of ``GET /slots``, the lines of ``GET /metrics``.

Owns the names of fields and metrics. Refuses to ask the child anything: it tells what was heard last. Invariant:
nothing here waits.

Read next: ``httpchild.py``, whose attributes these are.
"""

from httpchild import EngineChild


def slot(child: EngineChild) -> dict:
    """The one slot, with what is held, what is done now, and what of the latest prompt was held already."""
    request = child.request
    return {
        "id": 0,
        "n_ctx": child.n_ctx,
        "is_processing": child.busy,
        "phase": child.phase,
        "n_prompt_tokens": child.n_held,
        "n_changes": child.n_changes,
        "n_waiting": child.n_waiting,
        "n_prompt": request.n_prompt,
        "n_read": request.n_read,
        "n_generated": request.n_generated,
        "cache_source": request.source,
        "cache_n": request.n_reused,
        "diverged_at": request.diverged_at,
        "model": child.state,
        "session": _session(child),
    }


def _session(child: EngineChild) -> dict | None:
    progress = child.progress
    if progress is None:
        return None
    names = {"action": progress.action, "filename": progress.filename, "phase": progress.phase}
    return {**names, "n_done": progress.done_bytes, "n_total": progress.total_bytes}


def metrics_text(child: EngineChild) -> str:
    """The metrics in the text format of Prometheus."""
    lines = []
    for name, kind, what, value in _metrics(child):
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value:.12g}"]
    return "\n".join(lines) + "\n"


def _metrics(child: EngineChild) -> list[tuple[str, str, str, float]]:
    """Name, type, help text and value of every metric."""
    totals, progress = child.totals, child.progress
    prompt_s, decode_s = totals.prompt_ms / 1000, totals.decode_ms / 1000
    read_rate = totals.n_prompt_read / prompt_s if prompt_s else 0
    decode_rate = totals.n_generated / decode_s if decode_s else 0
    counters = [
        ("llamacpp:prompt_tokens_total", "Prompt tokens read.", totals.n_prompt_read),
        ("llamacpp:prompt_seconds_total", "Time spent reading prompts.", prompt_s),
        ("llamacpp:tokens_predicted_total", "Tokens generated.", totals.n_generated),
        ("llamacpp:tokens_predicted_seconds_total", "Time spent generating.", decode_s),
        ("strata:cached_tokens_total", "Prompt tokens that were held already.", totals.n_cached),
        ("strata:engine_starts_total", "Starts of the engine process.", totals.n_starts),
        ("strata:sessions_saved_total", "Sessions saved.", totals.n_saved),
        ("strata:sessions_restored_total", "Sessions restored.", totals.n_restored),
        ("strata:sessions_failed_total", "Saves and restores refused or failed.", totals.n_session_failed),
    ]
    counters += [
        ("strata:store_written_bytes_total", "Bytes written to the store.", child.stored.written_bytes),
        ("strata:store_flushes_total", "Times that the store was written to.", child.stored.n_flushes),
        ("strata:store_failures_total", "Conversations that could not be written to the store.",
         child.stored.n_failures),
        ("strata:store_hits_total", "Prompts that went on from the store.", child.stored.n_hits),
        ("strata:store_tokens_total", "Prompt tokens that came from the store.", child.stored.n_tokens),
    ]  # fmt: skip
    gauges = [
        ("llamacpp:prompt_tokens_seconds", "Prompt tokens read per second.", read_rate),
        ("llamacpp:predicted_tokens_seconds", "Tokens generated per second.", decode_rate),
        ("llamacpp:requests_processing", "Requests that have the turn.", int(child.busy)),
        ("llamacpp:requests_deferred", "Requests waiting for the turn.", child.n_waiting),
        ("strata:engine_ready", "Whether the engine process is loaded.", int(child.state == "ready")),
        ("strata:held_tokens", "Tokens of the live conversation.", child.n_held),
        ("strata:session_running", "Whether a save or restore runs.", int(progress is not None)),
        ("strata:session_done_bytes", "Bytes done of it.", progress.done_bytes if progress else 0),
        ("strata:session_total_bytes", "Bytes of it in all.", progress.total_bytes if progress else 0),
    ]
    rows = [(name, "counter", what, value) for name, what, value in counters]
    return rows + [(name, "gauge", what, value) for name, what, value in gauges]
