"""The engine as a service: gRPC and HTTP over one frontend. Start at `frontend`."""
