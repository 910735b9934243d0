"""Where the options of `SamplingParams` stand in gRPC messages: a part of a message has a field of
the option's name.
"""

from collections.abc import Collection, Mapping

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from peagle_jax.options import options_of
from peagle_jax.sampling_params import SamplingParams
from serving.params import spelled
from serving.protos import peagle_v1_pb2


class Places:
    """The places of options in one type of messages.

    Args:
      parts: fields of the message whose messages have options.
      without: options that are not read from there.

    Attributes:
      spelling: path of each option in the message.
    """

    def __init__(self, message: Descriptor, *parts: str, without: Collection[str] = ()):
        self._fields = {
            name: (part, field)
            for part in parts
            for name in options_of(SamplingParams)
            if (
                field := message.fields_by_name[part].message_type.fields_by_name.get(spelled(name))
            )
            and name not in without
        }
        self.spelling = {name: f"{part}.{one.name}" for name, (part, one) in self._fields.items()}

    def read(self, message: Message) -> dict[str, object]:
        """The options of a message. 0 counts as left out where the message cannot tell the two
        apart.
        """
        values: dict[str, object] = {}
        for name, (part, field) in self._fields.items():
            inner = getattr(message, part)
            value = getattr(inner, field.name)
            if inner.HasField(field.name) if field.has_presence else value:
                is_list = field.message_type is not None and not field.is_repeated
                values[name] = value.ids if is_list else value
        return values

    def write(self, message: Message, values: Mapping[str, object]) -> None:
        """Sets options.

        Raises:
          ValueError: the message cannot hold a value.
        """
        for name, value in values.items():
            part, field = self._fields[name]
            inner = getattr(message, part)
            place = getattr(inner, field.name)
            if not field.is_repeated and field.message_type is None:
                setattr(inner, field.name, value)
            elif field.message_type is None:
                place.extend(value)
            elif field.is_repeated:  # a map
                place.update(dict(value))
            else:
                place.ids.extend(value)


GENERATE = Places(
    peagle_v1_pb2.GenerateRequest.DESCRIPTOR, *("sampling", "stopping", "output", "speculation")
)
"""The options of a request of `peagle.v1`."""
