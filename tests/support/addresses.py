"""Addresses for clusters of processes on this machine."""

import socket


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("localhost", 0))
    addresses = [f"localhost:{listener.getsockname()[1]}" for listener in sockets]
    for listener in sockets:
        listener.close()
    return addresses
