"""Finds faults in the heads of requests that the HTTP parser accepts and RFC 9112 forbids.

A proxy may interpret such a head differently than this server, for example as two requests (request
smuggling). The server refuses them and closes the connection.
"""


def find_fault(head: bytes) -> str | None:
    """The first fault of a head; None if it has none.

    Args:
      head: bytes from the request line on. The head may be incomplete, or followed by other bytes.
    """
    end = head.find(b"\r\n\r\n")
    lines = (head if end < 0 else head[:end]).split(b"\n")
    for line in lines[:-1]:
        if not line.endswith(b"\r"):
            return "a line of the head ends without a carriage return"
    # The last line may be incomplete: it may end between \r and \n.
    for line in lines:
        if b"\r" in line.removesuffix(b"\r"):
            return "a line of the head has a carriage return inside"
    if any(line[:1] in (b" ", b"\t") for line in lines[1:]):
        return "a header goes on in a second line"
    names = {line.partition(b":")[0].strip().lower() for line in lines[1:]}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            return "Content-Length and Transfer-Encoding exclude each other"
        if lines[0].rstrip(b"\r").endswith(b"HTTP/1.0"):
            return "HTTP/1.0 has no Transfer-Encoding"
    return None
