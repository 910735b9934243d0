"""gRPC: the services and the server that holds them."""
