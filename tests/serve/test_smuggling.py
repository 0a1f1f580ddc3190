"""Request smuggling: the server and another parser agree on where every request ends.

h11 is the other parser. The server may read fewer requests than h11, if it refuses the next one or
closes the connection, but never more or other requests. SPELLINGS lists the few requests that the
server accepts although h11 refuses them.

Source: the families of attacks in "HTTP Desync Attacks" (Kettle, 2019) and its successors.
"""

import random

import pytest
from raw_http import read_by_h11, read_by_server

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)


def post(*lines: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = [b"POST /first HTTP/" + version, b"host: a", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


LENGTH = b"content-length: %d" % len(HIDDEN)
CHUNKED = b"transfer-encoding: chunked"
BODIES = {
    "no body": post(),
    "length 0": post(b"content-length: 0"),
    "length": post(LENGTH, body=HIDDEN),
    "chunked": post(CHUNKED, body=CHUNKS),
    "chunked, empty": post(CHUNKED, body=b"0\r\n\r\n"),
}
OFFERS = {
    "websocket": (b"connection: Upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"),
    "h2c of Java": (
        b"connection: Upgrade, HTTP2-Settings",
        b"upgrade: h2c",
        b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    ),
    "upgrade alone": (b"upgrade: h2c",),
    "connection alone": (b"connection: upgrade",),
    "several": (b"connection: keep-alive", b"connection: upgrade", b"upgrade: TLS/1.0, h2c"),
    "and close": (b"connection: upgrade, close", b"upgrade: h2c"),
}


def offering(data: bytes, lines: tuple[bytes, ...]) -> bytes:
    first, _, rest = data.partition(b"\r\n")
    return b"\r\n".join([first, *lines, rest])


HEADS = {
    **BODIES,
    **{
        f"{offer}, {body}": offering(data, lines)
        for offer, lines in OFFERS.items()
        for body, data in BODIES.items()
    },
    # Two lengths
    "length twice, equal": post(LENGTH, LENGTH, body=HIDDEN),
    "length twice, 0 first": post(b"content-length: 0", LENGTH, body=HIDDEN),
    "length twice, 0 last": post(LENGTH, b"content-length: 0", body=HIDDEN),
    "length as a list": post(b"content-length: %d, %d" % ((len(HIDDEN),) * 2), body=HIDDEN),
    "length as a list of two": post(b"content-length: 0, %d" % len(HIDDEN), body=HIDDEN),
    # Lengths that are not numbers
    **{
        f"length {text!r}": post(b"content-length: " + text, body=HIDDEN)
        for text in (
            b"", b"+0", b"-0", b"-1", b"0x0", b"0_0", b"1e1", b"0 0", b"0\t0", b"0;", b'"0"',
            b"\x0b0", b"\xd9\xa0", b"99999999999999999999", b"000000000000000000000000000000000",
            b"0\x00", b"00", b" 0 ", b"0.0",
        )
    },
    # Length and chunked
    "length, chunked": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunked, length": post(CHUNKED, b"content-length: 0", body=CHUNKS),
    "chunked, length of chunks": post(CHUNKED, b"content-length: %d" % len(CHUNKS), body=CHUNKS),
    # Codings
    **{
        f"coding {text!r}": post(b"transfer-encoding: " + text, body=CHUNKS)
        for text in (
            b"Chunked", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked", b"identity",
            b"identity, chunked", b"chunked, identity", b"xchunked", b"chunkedx", b"chunked;q=1",
            b'"chunked"', b"chunk", b"", b" chunked ", b"\tchunked", b"chunked\t", b"chunked,",
            b",chunked", b"\x0bchunked", b"chunked\x00", b"deflate", b"chunked\xa0",
        )
    },
    "coding twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "coding twice, gzip first": post(b"transfer-encoding: gzip", CHUNKED, body=CHUNKS),
    "coding twice, gzip last": post(CHUNKED, b"transfer-encoding: gzip", body=CHUNKS),
    "coding of HTTP/1.0": post(CHUNKED, body=CHUNKS, version=b"1.0"),
    "coding of HTTP/1.0, kept": post(
        CHUNKED, b"connection: keep-alive", body=CHUNKS, version=b"1.0"
    ),
    "length of HTTP/1.0": post(LENGTH, body=HIDDEN, version=b"1.0"),
    "upgrade, gzip": post(*OFFERS["h2c of Java"], b"transfer-encoding: gzip", body=CHUNKS),
    "upgrade, both": post(*OFFERS["h2c of Java"], LENGTH, CHUNKED, body=CHUNKS),
    # Names
    **{
        f"name {name!r}": post(name + b" " + value, body=body)
        for value, body in ((b"%d" % len(HIDDEN), HIDDEN), (b"chunked", CHUNKS))
        for name in (
            (b"content-length :", b"content-length\t:", b" content-length:", b"content_length:",
             b"content-length\x00:", b"content-length\r:", b"x: y\ncontent-length:", b"\x00:")
            if value != b"chunked" else
            (b"transfer-encoding :", b"transfer-encoding\t:", b" transfer-encoding:",
             b"transfer_encoding:", b"transfer-encoding\x00:", b"transfer-encoding\xa0:",
             b"x: y\ntransfer-encoding:", b"x: y\rtransfer-encoding:", b"transfer-encoding")
        )
    },
    # Folded lines, and other line endings
    "length folded": post(b"content-length:\r\n %d" % len(HIDDEN), body=HIDDEN),
    "coding folded": post(b"transfer-encoding:\r\n chunked", body=CHUNKS),
    "coding folded in two": post(b"transfer-encoding: chunked\r\n , gzip", body=CHUNKS),
    "folded before all": post(b" x", LENGTH, body=HIDDEN),
    "line feeds": post(LENGTH, body=HIDDEN).replace(b"\r\n", b"\n"),
    "a line feed ends the head": post(LENGTH).removesuffix(b"\r\n") + b"\n" + HIDDEN,
    "returns": post(LENGTH).replace(b"\r\n", b"\r") + HIDDEN,
    "blank lines before": b"\r\n\r\n" + post(LENGTH, body=HIDDEN),
    "a line feed before": b"\n" + post(LENGTH, body=HIDDEN),
    "a space before": b" " + post(LENGTH, body=HIDDEN),
    # Chunks
    **{
        f"chunks {body!r}": post(CHUNKED, body=body)
        for body in (
            b"1;a=b\r\nx\r\n0\r\n\r\n", b'1;a="b\r\n0"\r\nx\r\n0\r\n\r\n', b"1;\r\nx\r\n0\r\n\r\n",
            b"1 ;a\r\nx\r\n0\r\n\r\n", b"1;a\nx\r\n0\r\n\r\n", b"1;a\rx\r\n0\r\n\r\n",
            b"1 \r\nx\r\n0\r\n\r\n", b"1\t\r\nx\r\n0\r\n\r\n", b" 1\r\nx\r\n0\r\n\r\n",
            b"+1\r\nx\r\n0\r\n\r\n", b"-1\r\nx\r\n0\r\n\r\n", b"0x1\r\nx\r\n0\r\n\r\n",
            b"1_0\r\nx\r\n0\r\n\r\n", b"01\r\nx\r\n0\r\n\r\n", b"0000000001\r\nx\r\n0\r\n\r\n",
            b"00000000000000001\r\nx\r\n0\r\n\r\n", b"000000000000000000001\r\nx\r\n0\r\n\r\n",
            b"10000000000000001\r\nx\r\n0\r\n\r\n", b"ffffffffffffffff\r\nx\r\n0\r\n\r\n",
            b"A\r\n0123456789\r\n0\r\n\r\n", b"g\r\nx\r\n0\r\n\r\n", b"\r\nx\r\n0\r\n\r\n",
            b"1\nx\r\n0\r\n\r\n", b"1\r\nx\n0\r\n\r\n", b"1\r\nx0\r\n\r\n", b"1\r\nxy\r\n0\r\n\r\n",
            b"1\r\nx\r\n0\n\n", b"1\r\nx\r\n0\r\n\n", b"1\r\rx\r\n0\r\n\r\n", b"00\r\n\r\n",
            b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"1;\x00\r\nx\r\n0\r\n\r\n", b"1;\xff\r\nx\r\n0\r\n\r\n",
            b"0;a=b\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\ncontent-length: 9\r\n\r\n",
            b"0\r\ntransfer-encoding: gzip\r\n\r\n", b"0\r\nhost: b\r\nauthorization: c\r\n\r\n",
            b"0\r\nx : y\r\n\r\n", b"0\r\n x\r\n\r\n", b"0\r\nx: y\n\r\n", b"0\r\n\r\r\n",
            b"0\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", b"0\r\nGET / HTTP/1.1\r\n\r\n",
        )
    },
    "chunks after an offer": post(
        *OFFERS["h2c of Java"], CHUNKED, body=b"1;a=b\r\nx\r\n0\r\nx: y\r\n\r\n"
    ),
    "a chunk with a sign after an offer": post(
        *OFFERS["h2c of Java"], CHUNKED, body=b"+1\r\nx\r\n0\r\n\r\n"
    ),
    # First lines
    **{
        f"line {line!r}": line + b"\r\nhost: a\r\n" + LENGTH + b"\r\n\r\n" + HIDDEN
        for line in (
            b"CONNECT a:1 HTTP/1.1", b"CONNECT /first HTTP/1.1", b"POST /first", b"GET /first",
            b"POST /first HTTP/0.9", b"POST /first HTTP/1.2", b"POST /first HTTP/2.0",
            b"POST /first HTTP/1.1 ", b"POST /first  HTTP/1.1", b"POST  /first HTTP/1.1",
            b"POST\t/first\tHTTP/1.1", b"POST /first HTTP/1.1\t", b"post /first HTTP/1.1",
            b"POST /fi rst HTTP/1.1", b"POST /first http/1.1", b"POST /first HTTP/01.1",
            b"POST /first HTTP/1.1.1", b"GET /first HTTP/1.1", b"HEAD /first HTTP/1.1",
            b"DELETE /first HTTP/1.1", b"PRI /first HTTP/1.1", b"POST /\x00 HTTP/1.1",
            b"POST /first ICE/1.0", b"SOURCE /first ICE/1.0", b"POST /first RTSP/1.0",
        )
    },
    # Close, expect and pipelines
    "close": post(b"connection: close", LENGTH, body=HIDDEN),
    "expects": post(b"expect: 100-continue", LENGTH, body=HIDDEN),
    "a pipeline": post(LENGTH, body=HIDDEN) + HIDDEN + post(CHUNKED, body=CHUNKS) + HIDDEN * 3,
    "a pipeline of offers": offering(HIDDEN, OFFERS["h2c of Java"]) * 3
    + offering(BODIES["chunked"], OFFERS["websocket"]) * 2,
}  # fmt: skip

# Requests that h11 refuses, and the same requests in a spelling that h11 accepts. RFC 9112 lets a
# server skip blank lines (2.2) and take several spaces for one (3).
SPELLINGS = {
    "blank lines before": post(LENGTH, body=HIDDEN),
    "a line feed before": post(LENGTH, body=HIDDEN),
    "line b'POST /first  HTTP/1.1'": post(LENGTH, body=HIDDEN),
    "line b'POST  /first HTTP/1.1'": post(LENGTH, body=HIDDEN),
    "line b'POST /first RTSP/1.0'": post(LENGTH, body=HIDDEN, version=b"1.0"),
    "line b'SOURCE /first ICE/1.0'": post(LENGTH, body=HIDDEN, version=b"1.0").replace(
        b"POST", b"SOURCE"
    ),
    r"chunks b'000000000000000000001\r\nx\r\n0\r\n\r\n'": post(
        CHUNKED, body=b"1\r\nx\r\n0\r\n\r\n"
    ),
}


def packets_of(data: bytes, seed: int) -> list[bytes]:
    """The bytes in packets of random lengths, or all of 1 byte."""
    draw = random.Random(seed)
    n_most = draw.choice((1, 2, 5, 50))
    packets = []
    while data:
        n_bytes = draw.randint(1, n_most)
        packets.append(data[:n_bytes])
        data = data[n_bytes:]
    return packets


@pytest.mark.parametrize("name", HEADS)
def test_requests_end_where_h11_ends_them(name):
    """Regression: with an Upgrade header the body was dropped, and could be parsed as a request."""
    data = HEADS[name] + NEXT
    ours, others = read_by_server([data]), read_by_h11(SPELLINGS.get(name, HEADS[name]) + NEXT)
    n_read = len(ours.requests)
    assert ours.requests == others.requests[:n_read], (ours, others)
    if n_read < len(others.requests):
        assert ours.is_closed, (ours, others)
        assert b"HTTP/1.1 400 " in ours.written or b"connection: close" in ours.written
    for seed in range(4):
        again = read_by_server(packets_of(data, seed))
        assert again.requests == ours.requests and again.is_closed == ours.is_closed, seed


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("body", BODIES)
def test_upgrade_offer_does_not_change_the_parsed_requests(offer, body):
    """Regression: every POST of Java's HttpClient, which offers h2c, got 400."""
    plain, offered = BODIES[body] + NEXT, offering(BODIES[body], OFFERS[offer]) + NEXT
    n_answered = 1 if offer == "and close" else 2
    found = read_by_server([offered]).requests
    assert found == read_by_server([plain]).requests[:n_answered] and len(found) == n_answered


def test_trailers_are_not_passed_as_headers():
    seen = []
    trailers = post(CHUNKED, body=b"0\r\nauthorization: key\r\nhost: b\r\n\r\n")
    read_by_server([trailers], seen.append)
    assert seen == [[(b"host", b"a"), (b"transfer-encoding", b"chunked")]]
