"""Messages and plans in words, short enough to read in a transcript."""

from __future__ import annotations

from coordd.errors import spans
from coordd.negotiation.stall import tell
from coordd.negotiation.wire import bits
from coordd.negotiation.worker import Bucket, Locked
from coordd.ops.messages import (
    Abort,
    Inquiry,
    Kind,
    Message,
    Plan,
    Report,
    Request,
    Response,
    StallReport,
    Welcome,
)

__all__ = ["bucket_words", "locked_words", "message_words", "report_words"]


def report_words(report: Report | None) -> str:
    """What a rank says, with slots as numbers."""
    if report is None:
        return "nothing"
    fillers = _slots(report.fillers)
    known = [f"slot {slot}" + " (filler)" * (slot in fillers) for slot in _slots(report.hits)]
    fresh = [
        f"{_request(told.request)} at {told.site.removeprefix('train.py:')}" + " (filler)" * told.filler
        for told in report.fresh
    ]
    unlock = f", breaks lock {report.unlock} after {report.lasted}" * bool(report.unlock)
    return f"seen {report.seen}{unlock}: " + (", ".join([*known, *fresh]) or "nothing new")


def message_words(message: Message) -> list[str]:
    """What the coordinator says, in one or more lines."""
    match message:
        case Plan():
            return _plan(message)
        case Abort(failure=failure):
            return [f"abort: rank {failure.rank} {failure.reason}"]
        case Inquiry():
            return ["what are you doing?"]
        case StallReport():
            return tell(message).splitlines()
        case Welcome(refusal=refusal):
            return [refusal or "welcome"]
        case _:
            raise TypeError(message)


def bucket_words(bucket: Bucket) -> str:
    """Its number, and what is in it."""
    sizes = f", first dimensions {list(bucket.sizes)}" if bucket.sizes else ""
    return f"bucket {bucket.sequence}: " + " ".join(entry.request.name for entry in bucket.entries) + sizes


def locked_words(locked: Locked) -> str:
    """One occurrence of a locked bucket."""
    return f"lock {locked.lock}, bucket {locked.index}, time {locked.occurrence}"


def _plan(plan: Plan) -> list[str]:
    lines = [f"plan {plan.sequence}" + ", the last" * plan.stop]
    lines += [f"  slot {slot}" for slot in _slots(plan.hits)]
    lines += [f"  slot {slot} is void" for slot in _slots(plan.voids)]
    lines += [f"  {_response(response)}" for response in plan.responses]
    lines += [f"  lock bucket {index}: slots {' '.join(map(str, slots))}" for index, slots in enumerate(plan.lock)]
    return lines + [f"  lock {plan.unlock} ends"] * bool(plan.unlock)


def _response(response: Response) -> str:
    to = f"refuse {response.request.name} to {spans(response.recipients)}: "
    if response.left:
        return to + f"{spans(response.left)} left"
    if response.error:
        return to + response.error.replace("train.py:", "")
    without = f" without {spans(response.absent)}" if response.absent else ""
    if response.void:
        return f"{response.request.name} is void{without}"
    return _request(response.request) + (f" into slot {response.slot}" if response.slot >= 0 else "") + without


def _request(request: Request) -> str:
    usual = Request(Kind.ALLREDUCE, request.name, "float32")
    words = [request.name, "x".join(map(str, request.shape)) or "scalar"]
    words += [request.kind.name.lower()] * (request.kind is not usual.kind)
    words += [request.dtype] * (request.dtype != usual.dtype)
    words += [request.op.name.lower()] * (request.op is not usual.op)
    words += [f"from {request.root}"] * (request.root != usual.root)
    words += [f"among {spans(request.members)}"] * bool(request.members)
    return " ".join(words)


def _slots(mask: bytes) -> list[int]:
    return list(bits(int.from_bytes(mask, "little")))
