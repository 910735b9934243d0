"""`peagle-client`: asks a server from the terminal. Imports gRPC and the stubs only, so it starts at once."""

from serving.client.command import main

__all__ = ["main"]
