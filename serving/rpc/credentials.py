"""TLS credentials of the gRPC port."""

import grpc

from serving.tls import Certificates, Pems


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials for a secure port; a handshake after a change of the files uses the new ones."""
    used = certificates.newest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called at every handshake; None keeps the last configuration."""
        nonlocal used
        newest = certificates.newest()
        if newest is used:
            return None
        used = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,
        require_client_authentication=certificates.needs_client_certificate,
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
