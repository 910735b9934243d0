"""Heads of requests that the HTTP parser accepts and RFC 9112 does not.

A proxy in front may read such a head in another way than this server, and so take one request for two
(request smuggling). They are refused, and the connection is closed.
"""


def fault(head: bytes) -> str | None:
    """What is wrong with a head; None if nothing is.

    Args:
      head: bytes from the request line on; perhaps not all of the head, perhaps more than it.
    """
    end = head.find(b"\r\n\r\n")
    lines = (head if end < 0 else head[:end]).split(b"\n")
    for line in lines[:-1]:
        if not line.endswith(b"\r"):
            return "a line of the head ends without a carriage return"
    # The last line may be cut anywhere, also between its two last bytes.
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
