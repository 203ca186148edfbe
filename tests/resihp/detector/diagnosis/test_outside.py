"""Exceptions of storage and of services, as common clients word them, against those of the program."""

from __future__ import annotations

import pytest

from resihp.detector.diagnosis.clues import read_log
from resihp.detector.diagnosis.diagnosis import diagnose
from resihp.detector.diagnosis.reports import Report
from tests.resihp.detector.lines import CAUSED, DURING, traceback

HUB = "https://huggingface.co/api/models/gpt2"

STORAGE = (
    "OSError: [Errno 5] Input/output error: '/data/shard-17.bin'",
    "OSError: [Errno 28] No space left on device: '/scratch/me/120.pt'",
    "OSError: [Errno 30] Read-only file system: '/scratch/log'",
    "OSError: [Errno 37] No locks available",
    "OSError: [Errno 70] Communication error on send: '/beegfs/data'",
    "ConnectionResetError: [Errno 104] Connection reset by peer: '/mnt/fuse/data/17.tar'",
    "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/bucket'",
    "BrokenPipeError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/data'",
    "TimeoutError: [Errno 110] Connection timed out: '/mnt/nfs/data'",
    "OSError: [Errno 112] Host is down: '/gpfs/data/x'",
    "OSError: [Errno 113] No route to host: '/mnt/nfs/data'",
    "OSError: [Errno 116] Stale file handle: '/data/shard-17.bin'",
    "OSError: [Errno 116] Stale NFS file handle",
    "OSError: [Errno 117] Structure needs cleaning: '/scratch/x'",
    "OSError: [Errno 121] Remote I/O error",
    "OSError: [Errno 122] Disk quota exceeded",
    "PermissionError: [Errno 127] Key has expired: '/afs/data'",
    "OSError: [Errno 19] No such device: '/gpfs/data/x'",
    "OSError: Can't synchronously read data (file read failed: time = Mon Mar  3 09:26:51 2025, filename = 'x.h5', "
    "errno = 5, error message = 'Input/output error', buf = 0x5)",
    "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
    "sqlite3.OperationalError: disk I/O error",
    "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/0: file "
    "write failed",
)
SERVICES = (
    f"requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: {HUB}",
    f"requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: {HUB}",
    f"requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: {HUB}",
    f"huggingface_hub.errors.HfHubHTTPError: 500 Server Error: Internal Server Error for url: {HUB}",
    f"huggingface_hub.errors.HfHubHTTPError: 429, Client Error: Too Many Requests for url: {HUB}",
    "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and "
    "we cannot find the requested files in the local cache. Please check your connection and try again",
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached "
    "files. Check your internet connection or see how to run the library in offline mode",
    "ConnectionError: Couldn't reach 'allenai/c4' on the Hub (ConnectTimeout)",
    "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
    "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>",
    "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: /x "
    "(Caused by ResponseError('too many 503 error responses'))",
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hub', port=443): Read timed out. (read timeout=10)",
    "requests.exceptions.SSLError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: / (Caused "
    "by SSLError(SSLEOFError(8, '[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol')))",
    "http.client.RemoteDisconnected: Remote end closed connection without response",
    "http.client.IncompleteRead: IncompleteRead(511 bytes read, 1537 more expected)",
    "httpx.HTTPStatusError: Server error '502 Bad Gateway' for url 'https://hub/x'",
    "httpx.HTTPStatusError: Client error '429 Too Many Requests' for url 'https://hub/x'",
    "httpx.ConnectTimeout: timed out",
    "httpx.RemoteProtocolError: Server disconnected without sending a response.",
    "aiohttp.client_exceptions.ClientResponseError: 503, message='Service Unavailable', url=URL('https://hub/x')",
    "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host hub:443 ssl:default [None]",
    "aiohttp.client_exceptions.ClientPayloadError: Response payload is not completed",
    "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected",
    "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation (reached max "
    "retries: 4): Please reduce your request rate.",
    "botocore.exceptions.ClientError: An error occurred (503) when calling the HeadObject operation: Unavailable",
    "botocore.exceptions.ClientError: An error occurred (InternalError) when calling the PutObject operation: We "
    "encountered an internal error.",
    'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://s3.local/b"',
    'botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: "https://s3.local/b"',
    "google.api_core.exceptions.ServiceUnavailable: 503 failed to connect to all addresses",
    "gcsfs.retry.HttpError: Internal Server Error, 500",
    "azure.core.exceptions.ServiceRequestError: <urllib3.connection.HTTPSConnection object>: unreachable",
    "azure.core.exceptions.HttpResponseError: Operation returned an invalid status 'Service Unavailable'",
    "fsspec.exceptions.FSTimeoutError",
    "grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with:\n\tstatus = "
    "StatusCode.UNAVAILABLE",
    "wandb.errors.errors.CommError: Error uploading run: returned error 502: Bad Gateway",
    "mlflow.exceptions.MlflowException: API request to https://m/api failed with exception "
    "HTTPSConnectionPool(host='m', port=443): Max retries exceeded with url: /api (Caused by None)",
    "mlflow.exceptions.MlflowException: API request to endpoint /api failed with error code 503 != 200. Response body: "
    "'Service Unavailable'",
    'psycopg.OperationalError: connection to server at "db", port 5432 failed: timeout expired',
    "pymysql.err.OperationalError: (2003, \"Can't connect to MySQL server on 'db' (timed out)\")",
    "pymongo.errors.ServerSelectionTimeoutError: db:27017: timed out",
    "socket.gaierror: [Errno -2] Name or service not known",
    "openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit reached'}}",
    "RuntimeError: cannot download shard 17: HTTP status 503",
    "RuntimeError: download failed with status code: 504",
    "RuntimeError: license server is not reachable: FlexNet Licensing error:-15,570",
    "vendor.LicenseError: all licenses are in use",
    "RuntimeError: curl: (6) Could not resolve host: hub.local",
    "ConnectionError: Couldn't reach https://huggingface.co/datasets/c4 (error 503)",
    "anthropic.OverloadedError: Error code: 529",
    "RuntimeError: server answered with status 503",
)
CONNECTIONS = (
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "TimeoutError: [Errno 110] Connection timed out",
    "socket.timeout: timed out",
    "TimeoutError: timed out",
    "OSError: [Errno 101] Network is unreachable",
)
PROGRAM = (
    "AssertionError",
    "AssertionError: 503 is no multiple of 8",
    "KeyError: 503",
    "KeyError: 'status'",
    "ValueError: too many values to unpack (expected 2)",
    "ValueError: batch size 500 is too large",
    "ValueError: exit status 500 expected",
    "IndexError: list index out of range",
    "ImportError: cannot import name 'x' from 'y'",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/5'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/errno/5/28'",
    "PermissionError: [Errno 13] Permission denied: '/data/x'",
    "IsADirectoryError: [Errno 21] Is a directory: '/data'",
    "FileExistsError: [Errno 17] File exists: '/out'",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "OSError: [Errno 98] Address already in use",
    "OSError: [Errno 24] Too many open files",
    "OSError: [Errno 22] Invalid argument",
    "OSError: gpt9 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
    f"huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: 500) Not Found for url: {HUB}",
    f"huggingface_hub.errors.GatedRepoError: 403 Client Error: Forbidden for url: {HUB}",
    f"requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: {HUB}",
    "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and outgoing "
    "traffic has been disabled. Set 'local_files_only' to False. Check your connection",
    "requests.exceptions.MissingSchema: Invalid URL 'hub': No scheme supplied",
    "urllib.error.HTTPError: HTTP Error 404: Not Found",
    "botocore.exceptions.ClientError: An error occurred (NoSuchKey) when calling the GetObject operation: no such key",
    "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: Access "
    "Denied",
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "sqlite3.OperationalError: no such table: samples",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (500x503 and 504x429)",
    "RuntimeError: Expected all tensors to be on the same device",
    "ZeroDivisionError: division by zero",
    "my_project.errors.Diverged: loss 503.2 at step 429",
    "TypeError: train() got an unexpected keyword argument 'license'",
    "RuntimeError: Overloaded torch operator invoked from Python failed to match any schema:",
    "TypeError: No overloaded function matches",
    "hydra.errors.InstantiationException: Could not resolve '_target_'",
    "ValueError: failed to resolve the name of layer 3",
    "RuntimeError: Couldn't reach a valid config",
    "ValueError: status 500 not in label map",
    "ValueError: rate limit must be positive",
    "ValueError: Could not resolve host-side dtype for column 'x'",
    "RuntimeError: reached max retries after a spike of the loss",
)


def category(text: str) -> str:
    clues = read_log(text)
    assert clues
    return diagnose([Report(rank=0, node="n1", device=0, exit=1, clues=clues)]).category


@pytest.mark.parametrize(
    ("errors", "expected"),
    [(STORAGE, "storage"), (SERVICES, "service"), (PROGRAM, "program")],
    ids=lambda x: str(x)[:8],
)
def test_an_error_is_laid_to_what_failed(errors: tuple[str, ...], expected: str) -> None:
    assert {error: category(traceback(error)) for error in errors} == dict.fromkeys(errors, expected)


def test_a_connection_may_be_one_to_a_peer_where_nothing_tells() -> None:
    kinds = {error: read_log(traceback(error, raised_in="socket.py"))[-1].kind for error in CONNECTIONS}
    assert kinds == dict.fromkeys(CONNECTIONS, "connection failed")


@pytest.mark.parametrize("error", [STORAGE[0], SERVICES[0], SERVICES[6]])
@pytest.mark.parametrize("between", [CAUSED, DURING])
def test_what_a_script_makes_of_such_an_error_is_still_of_it(error: str, between: str) -> None:
    text = traceback(error) + between + traceback("RuntimeError: cannot load the tokenizer")
    assert category(text) in ("storage", "service")


def test_one_that_was_lived_with_does_not_count() -> None:
    assert category(traceback(SERVICES[0]) + "\nretrying\n" + traceback("KeyError: 'input_ids'")) == "program"


def test_a_service_that_failed_on_several_ranks_is_told_once() -> None:
    clues = read_log(traceback(SERVICES[0]))
    verdict = diagnose([Report(rank=rank, node=f"n{rank}", exit=1, clues=clues) for rank in range(3)])
    assert (verdict.category, verdict.node, verdict.blames_node) == ("service", None, False)
    assert verdict.cause.startswith("3 ranks raised the same: requests.exceptions.HTTPError: 503")
