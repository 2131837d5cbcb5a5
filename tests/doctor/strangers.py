"""Servers that are no etcd: one that only shows a certificate, one that says nothing."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import trustme

WITHIN_S = 60.0


@contextlib.contextmanager
def tls_server(issued: trustme.LeafCert) -> Iterator[int]:
    """Shakes hands with whoever comes, and hangs up; the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as secured:
            secured.recv(1)

    with _server(serve) as port:
        yield port


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """Takes what comes until the other end hangs up, and says nothing; the port."""

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while sock.recv(4096):
                pass

    with _server(serve) as port:
        yield port


@contextlib.contextmanager
def _server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, _ = server.accept()
                    with sock:
                        sock.settimeout(WITHIN_S)
                        serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join(2 * WITHIN_S)
            assert not thread.is_alive()
