"""`peagle-client`: sends requests from the terminal. Imports only gRPC and the stubs, so it starts fast."""

from serving.client.command import main

__all__ = ["main"]
