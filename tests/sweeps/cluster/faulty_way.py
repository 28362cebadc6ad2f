"""Provide a small proxy to a Ray dashboard that simulates faults of real connections, which the client has to handle.

It replaces the answer to the first submit by an HTTP 500, so that the job has started although the client gets an
error. It cuts the first two connections that carry a log after some bytes. Each connection carries one request.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CUTS = 2  # the number of connections for the log that are cut
BYTES = 150  # the bytes of a log's answer that pass before the connection is cut: a part of the header


class FaultyWay:
    def __init__(self, address: str) -> None:
        self._target = (urlsplit(address).hostname, urlsplit(address).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = self.cut = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop accepting new connections; open connections stay open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # needed, since `close` alone does not wake a thread in `accept`
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # `accept` raises it when the listener is closed
            while True:
                threading.Thread(target=self._carry, args=(self._listener.accept()[0],), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target) as server:
            request = client.recv(65536)
            server.sendall(request)
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            if request.startswith(b"POST /api/jobs/ ") and not self.refused:
                self.refused += 1
                server.recv(65536)
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nlost")
            elif b"/logs " in request and self.cut < CUTS:
                self.cut += 1
                _pump(server, client, BYTES)
            else:
                _pump(server, client)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket, most: int | None = None) -> None:
    with suppress(OSError):
        carried = 0
        while (most is None or carried < most) and (piece := source.recv(65536 if most is None else most - carried)):
            target.sendall(piece)
            carried += len(piece)


@contextmanager
def faulty_way(address: str) -> Iterator[FaultyWay]:
    way = FaultyWay(address)
    try:
        yield way
    finally:
        way.close()
