"""The gRPC server: services, health, reflection, limits of connections and messages."""

from collections.abc import Sequence
from functools import partial

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from peagle_jax.sampling_params import MAX_BIAS
from serving.frontend import Frontend, State
from serving.protos import open_inference_pb2, peagle_v1_pb2, peagle_v1_pb2_grpc, vllm_engine_pb2
from serving.rpc import foreign, open_inference, vllm
from serving.rpc.control import Control
from serving.rpc.guard import CONTROL, Guard, MessageLimits
from serving.rpc.health import HealthServicer
from serving.rpc.peagle import Generation
from serving.rpc.wire import WireLimits
from serving.tls import Certificates, Pems

_OPTIONS = (
    # Gateways ping idle connections every 30 s, load generators more often; by default gRPC closes
    # these.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client whose connection is lost without a FIN or RST is detected within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_LARGEST = 2**31 - 1
"""Largest value of gRPC's options."""
_SERVICES = (
    peagle_v1_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    vllm.SERVICE,
    open_inference.SERVICE,
)
_WITH_PROMPTS = frozenset(
    f"/{service}/{method}"
    for service, methods in zip(
        _SERVICES,
        (("Generate", "GenerateOnce"), ("Generate",), ("ModelInfer", "ModelStreamInfer")),
        strict=True,
    )
    for method in methods
)
_TOKENS = "tokens.ids"
_REFLECTION = "grpc.reflection.v1"
_MIRROR = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_OWN_FILES = (
    *(any_pb2.DESCRIPTOR, duration_pb2.DESCRIPTOR),
    # What the details of a status are.
    *(status_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR),
    *(peagle_v1_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR),
)
_FOREIGN_FILES = {
    vllm.PACKAGE: vllm_engine_pb2.DESCRIPTOR,
    open_inference.PACKAGE: open_inference_pb2.DESCRIPTOR,
    # Equal to v1alpha but for its name; older tools know only that one, newer ones try this one
    # first.
    _REFLECTION: reflection_pb2.DESCRIPTOR,
}


class RpcServer:
    """All gRPC services over one frontend.

    Args:
      frontend: it may still be starting.
      tokens: valid bearer tokens; if empty, no token is needed.
      certificates: None serves without TLS.
      max_message_bytes: most bytes of a request.
      max_connections: most open connections; further ones are closed at once.
      handshake_seconds: limit of the TLS and HTTP/2 handshakes, from the connection.
      idle_seconds: how long a connection without calls stays open.
      max_connection_seconds: age at which a client is asked to connect again; 0 is no limit.
      with_reflection: whether clients may list the services.
    """

    def __init__(
        self,
        frontend: Frontend,
        *,
        tokens: Sequence[bytes] = (),
        certificates: Certificates | None = None,
        max_message_bytes: int = 8 << 20,
        max_connections: int = 2048,
        handshake_seconds: float = 10.0,
        idle_seconds: float = 300.0,
        max_connection_seconds: float = 0.0,
        with_reflection: bool = False,
    ):
        options = [
            *_OPTIONS,
            # With it two servers on one port would share its calls without an error.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", _milliseconds(handshake_seconds)),
            ("grpc.max_connection_idle_ms", _milliseconds(idle_seconds)),
            # A gateway may send all requests that the queue holds over one connection.
            (
                "grpc.max_concurrent_streams",
                min(max(4096, 2 * frontend.config.max_waiting), _LARGEST),
            ),
        ]
        if max_connection_seconds:
            options.append(("grpc.max_connection_age_ms", _milliseconds(max_connection_seconds)))
        limits = MessageLimits(
            max_bytes=max_message_bytes,
            large=_WITH_PROMPTS,
            wire=_wire_limits(frontend),
            names={_TOKENS: "tokens"},
            on_read=frontend.memory.schedule,
        )
        self._server = grpc.aio.server(
            interceptors=[Guard(tokens, limits, partial(frontend.refused, "grpc"))], options=options
        )
        self._certificates = certificates
        self._health = HealthServicer(_SERVICES)
        self._frontend = frontend
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        peagle_v1_pb2_grpc.add_GenerationServicer_to_server(Generation(frontend), self._server)
        peagle_v1_pb2_grpc.add_ControlServicer_to_server(Control(frontend), self._server)
        self._server.add_generic_rpc_handlers(
            (vllm.make_handler(frontend), open_inference.make_handler(frontend))
        )
        if with_reflection:
            packages = (reflection_pb2.DESCRIPTOR.package, _REFLECTION)
            mirrors = [f"{package}.{_MIRROR.name}" for package in packages]
            names = (*_SERVICES, CONTROL, health.SERVICE_NAME, *mirrors)
            pool = foreign.pool(_OWN_FILES, _FOREIGN_FILES)
            servicer = reflection.aio.ReflectionServicer(names, pool=pool)
            self._server.add_generic_rpc_handlers(
                [foreign.handler(servicer, _MIRROR, package) for package in packages]
            )

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port. The health is NOT_SERVING until the frontend serves.

        Raises:
          OSError: the address cannot be used.
        """
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, server_credentials(self._certificates))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}; is another server there?") from error
        self.show(self._frontend.state)
        await self._server.start()
        return port

    def show(self, state: State) -> None:
        """Sets the health of all services, also for open watches."""
        statuses = health_pb2.HealthCheckResponse
        self._health.set(statuses.SERVING if state is State.SERVING else statuses.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Accepts no more calls, ends health watches, and after `grace` seconds cancels
        the rest.
        """
        self._health.close()
        await self._server.stop(grace)


def _milliseconds(seconds: float) -> int:
    """A time of gRPC's options: at most 24.8 days."""
    return max(1, int(min(1000 * seconds, _LARGEST)))


def _wire_limits(frontend: Frontend) -> WireLimits:
    prompt, stops = frontend.config.max_model_len, frontend.limits.max_stop_ids
    return WireLimits(
        fields=8 * frontend.limits.max_messages,
        numbers={
            _TOKENS: prompt,
            "tokenized.input_ids": prompt,
            "stopping.stop_token_ids": stops,
            "sampling_params.stop_token_ids": stops,
            "sampling.allowed_token_ids.ids": MAX_BIAS,
        },
    )


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
