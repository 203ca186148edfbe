"""Decides whether storage, or a service that the program calls, is the cause of an exception, and not the program.

Such an exception may be raised on all ranks at once, in the same words, and the program is still not at fault: another
run may succeed. It is recognised by the error number of a system call, by an HTTP status, or by the words and class
names of common clients (requests, urllib3, httpx, aiohttp, botocore, google, azure, grpc, huggingface_hub, databases,
licence managers). If the program asked for something that does not exist (404, NoSuchKey, a wrong path) or is not
permitted (401, 403), the program is at fault. Called by `clues`; calls `connections` first. Pure.
"""

from __future__ import annotations

import re

from resihp.detector.diagnosis.connections import is_the_groups, of_connection
from resihp.detector.diagnosis.signatures import (
    CONNECTION_FAILED,
    EXCEPTION,
    FILE_MISSING,
    PEER_CLOSED,
    SERVICE_FAILED,
    STORAGE_FAILED,
    Signature,
)

_ERRNO = re.compile(r"\[Errno (\d{1,3})\]|\berrno[ =:]{1,3}(\d{1,3})\b")
_FILE = re.compile(r"(?::|->) b?['\"][^'\"]{1,400}['\"]?$|\bfilename\b")
"""A quoted path at the end of the error, as Python's OSError names it, or the word "filename"."""
STORAGE_ERRNOS = frozenset({5, 28, 30, 37, 61, 67, 70, 74, 107, 108, 116, 117, 121, 122, 126, 127, 521, 526, 528})
"""Error numbers of storage: EIO ENOSPC EROFS ENOLCK ENODATA ENOLINK ECOMM EBADMSG ENOTCONN ESHUTDOWN ESTALE EUCLEAN
EREMOTEIO EDQUOT ENOKEY EKEYEXPIRED, and those of NFS."""
STORAGE_ERRNOS_WITH_A_FILE = frozenset({6, 11, 16, 19, 71, 100, 101, 104, 110, 111, 112, 113})
"""Error numbers such as EBUSY, ENODEV and ETIMEDOUT: errors of storage only if the message names a file."""
NETWORK_ERRNOS = frozenset({-2, -3, -5, 100, 101, 102, 103, 104, 110, 111, 112, 113})
_STORAGE = re.compile(
    r"Cannot send after transport endpoint shutdown|Structure needs cleaning|No locks available|Stale NFS file handle|"
    r"Communication error on send|Link has been severed|Required key not available|Key has expired|disk I/O error|"
    r"\bStorageFull\b|\bStaleNetworkFileHandle\b|\bQuotaExceeded\b|\bReadOnlyFilesystem\b"
)

_STATUS = r"(?:408|425|429|500|502|503|504|507|509|52\d|529|530|598|599)"
_SERVICE = re.compile(
    rf"\b{_STATUS},? (?:Server|Client) Error\b|\bHTTP Error {_STATUS}\b|(?:Server|Client) error '{_STATUS} |"
    rf"Error: {_STATUS}, message=|"
    rf"(?i:\bhttps?(?:[ _]?(?:status|error|code|response))*[\"']?[ :=(]{{1,4}}{_STATUS}\b)|"
    r"An error occurred \((?:SlowDown|Internal\w*|Service ?Unavailable\w*|"
    r"Request(?:Timeout|TimeTooSkewed|LimitExceeded)\w*|Throttl\w*|TooManyRequests\w*|Provisioned\w*|BandwidthLimit\w*|ServerBusy|OperationAborted|ExpiredToken\w*|"
    rf"{_STATUS})\)|"
    r"Name or service not known|name resolution|No address associated with hostname|nodename nor servname|"
    r"(?i:(?:could not|failed to) resolve (?:the )?(?:proxy |server |remote )?(?:host(?:name)?[ :'\"]|address\b))|"
    r"getaddrinfo failed|gai error|"
    r"Max retries exceeded with url|Failed to establish a new connection|Could not connect to the endpoint URL|"
    r"(?i:time-?(?:d )?out on endpoint URL)|Read timed out|The (?:read|write|handshake) operation timed out|"
    r"Remote end closed connection|Server disconnected|Response payload is not completed|IncompleteRead\(|"
    r"EOF occurred in violation of protocol|UNEXPECTED_EOF_WHILE_READING|"
    r"(?i:\b(?:service (?:temporarily )?unavailable|bad gateway|gateway time-?out|too many requests|"
    r"internal server error|rate limit(?:ed| exceeded| reached)|server busy|serverbusy)\b)|"
    r"reduce your request rate|\(reached max retries: \d|"
    r"couldn.t connect to '?https?:|Couldn't reach (?:.{1,200} on the Hub|'?https?:)|"
    r"[Cc]heck your (?:internet |network )?connection|"
    r"StatusCode\.(?:UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL|ABORTED)|"
    r"[Cc]an't connect to (?:local )?MySQL|[Cc]ould not connect to server|connection to server at|"
    r"Lost connection to MySQL|server closed the connection unexpectedly|"
    r"(?i:\blicen[cs]e (?:server|manager|daemon|service|checkout|check-out)|\bflexnet\b|\bflexlm\b|"
    r"\bno (?:more )?licen[cs]es? (?:is |are )?(?:available|found)|licen[cs]ed number of users|"
    r"\blicen[cs]es? (?:is |are )?(?:all )?in use|\b(?:check ?out|acquire|obtain|get) (?:a |the )?licen[cs]e)"
)
_STATUS_OF_SOMETHING = re.compile(
    rf"(?i:(?<!exit )\bstatus(?:[ _]?(?:error|code|response))*[\"']?[ :=(]{{1,4}}{_STATUS}\b)"
)
_REQUEST_WORDS = re.compile(r"(?i)https?\b|response|request|download|upload|\bserver\b|\burl\b")
"""Words that show that a status is an HTTP status."""
_SERVICE_CLASSES = re.compile(
    r"(?:^|[.\s])(?:EndpointConnectionError|ConnectTimeout(?:Error)?|ReadTimeout(?:Error)?|WriteTimeout|PoolTimeout|"
    r"ConnectionClosedError|ResponseStreamingError|IncompleteRead(?:Error)?|HTTPClientError|RemoteDisconnected|"
    r"BadStatusLine|ServerDisconnectedError|Client(?:Connector\w{0,16}|OS|Payload)Error|ServerTimeoutError|"
    r"SocketTimeoutError|ConnectionTimeoutError|RemoteProtocolError|ConnectError|ChunkedEncodingError|ProxyError|"
    r"SSLError|SSLEOFError|SSLZeroReturnError|NameResolutionError|NewConnectionError|MaxRetryError|gaierror|herror|"
    r"FSTimeoutError|TransportError|ServiceUnavailable|TooManyRequests|InternalServerError|BadGateway|GatewayTimeout|"
    r"DeadlineExceeded|ServiceRequest\w{0,16}Error|ServiceResponse\w{0,16}Error|_InactiveRpcError|"
    r"_MultiThreadedRendezvous|AioRpcError|CommError|NeptuneConnectionLostException|ServerSelectionTimeoutError|"
    r"NoBrokersAvailable|AutoReconnect|NetworkTimeout|RateLimitError|APIConnectionError|APITimeoutError|"
    r"OverloadedError|ThrottlingException|LicenseError|LicenceError)(?::|$)"
)
_OFFLINE = re.compile(r"HF_HUB_OFFLINE|OfflineMode|local_files_only|outgoing traffic has been disabled")
"""Words of an error that is raised because the program, or its environment, switched connections off."""
_TIMED_OUT = re.compile(r"^(?:[\w.]{1,64}\.)?(?:TimeoutError|timeout)(?::? ?$|: .{0,64}timed? ?out)")
"""A timeout of a socket, either to a service or to a peer."""
_SQL_GONE = re.compile(r"\bOperationalError: .{0,120}(?:connection|connect to|server)", re.IGNORECASE)


def of_exception(
    signature: Signature, error: str, raised_in: str, after: Signature | None, following: str = ""
) -> Signature:
    """Return the kind of an exception with regard to connections, storage and services.

    `signature`: the kind by its words alone; `error`: text of the exception; `raised_in`: innermost file of the
    traceback, empty if unknown; `after`: kind of the preceding exception in the chain, None without one; `following`:
    the text below the exception's first line.
    """
    signature = of_connection(signature, error, raised_in, after)
    if signature not in (EXCEPTION, CONNECTION_FAILED, FILE_MISSING):
        return signature
    if is_the_groups(error, raised_in):
        return PEER_CLOSED if signature is EXCEPTION and "timed out" in error.lower() else signature
    number = _errno(error)
    names_a_file = _FILE.search(error) is not None
    if number in STORAGE_ERRNOS or (number in STORAGE_ERRNOS_WITH_A_FILE and names_a_file) or _STORAGE.search(error):
        return STORAGE_FAILED
    if signature is not EXCEPTION or _OFFLINE.search(error):
        return signature
    if _SERVICE_CLASSES.search(error.partition("(")[0]) or _SERVICE.search(error) or _SQL_GONE.search(error):
        return SERVICE_FAILED
    if _STATUS_OF_SOMETHING.search(error) and _REQUEST_WORDS.search(error):
        return SERVICE_FAILED
    if following.lstrip().startswith("status = StatusCode.") and _SERVICE.search(following[:200]):
        return SERVICE_FAILED
    if number in NETWORK_ERRNOS or _TIMED_OUT.search(error):
        return CONNECTION_FAILED
    return signature


def _errno(error: str) -> int | None:
    match = _ERRNO.search(error)
    return None if match is None else int(match[1] or match[2])
