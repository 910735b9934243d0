"""What the threads of `mosaic_norm_send` and `mosaic_norm` send and store on a GPU, without one."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import mosaic_norm, mosaic_norm_send
from pallas_kernels.moe.mosaic_norm_send import EXPERTS
from tests.kernels.cluster_threads import Threads


@pytest.mark.parametrize("R", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("D", [1024, 2048])
def test_messages_go_where_they_are_read(monkeypatch, R, D):
    """On a GPU; and as many bytes arrive as a block waits for."""
    tokens = 8 if R <= 8 else 16
    sizes = mosaic_norm_send.Sizes(R, D, tokens)
    threads = Threads(monkeypatch, mosaic_norm_send)
    x = np.zeros((sizes.own_steps, tokens, 128), jnp.bfloat16)
    refs = dict(x_smem=x, products_smem=np.zeros(0), logits_smem=np.zeros(0))

    def of(block):
        return mosaic_norm_send.Messages(sizes, 0, block, 0, barriers_smem=np.zeros(0), **refs)

    # A word of a row is its row and first column, of a product its step, expert and token.
    for r in range(R):
        for first in range(0, D, 512):
            columns = lambda thread, r=r, first=first: [
                [(r, first + 4 * thread + 2 * i) for i in range(2)]
            ]
            of(r % 8).send_row(r, first, columns, None)
    for step in range(sizes.steps):
        for tile in range(2):

            def product(thread, step=step, tile=tile):
                """Registers of wgmma's result [64, tokens]."""
                warp, lane = divmod(thread, 32)
                rows = [64 * tile + 16 * warp + 8 * j + lane // 4 for j in range(2)]
                pairs = [8 * t + 2 * (lane % 4) for t in range(tokens // 8)]
                return [[(step, e, pair + i) for i in range(2)] for pair in pairs for e in rows]

            of(step // sizes.own_steps).send_products(step, tile, product)
    for block in range(8):

        def totals(thread, block=block):
            """Registers of [16, tokens], in order."""
            numbers = [divmod(thread * (tokens // 8) + i, tokens) for i in range(tokens // 8)]
            return [[(16 * block + e, token) for e, token in numbers]]

        of(block).send_logits(totals)

    wanted = {}
    for r in range(R):
        for column in range(0, D, 2):
            step, own = divmod(column, 128)
            block, own_step = divmod(step, sizes.own_steps)
            half, own = divmod(own, 64)
            # Tiles of 8 rows and 64 columns; the swizzle adds bits 7 to 9 of an address to bits 4
            # to 6.
            address = own_step * tokens * 256 + r // 8 * 2048 + half * 1024 + r % 8 * 128 + own * 2
            wanted[0, block, address ^ (address >> 7 & 7) << 4] = r, column
    for step in range(sizes.steps):
        for e in range(EXPERTS):
            for token in range(tokens):
                address = 4 * ((step * 16 + e % 16) * tokens + token)
                wanted[1, e // 16, address] = step, e, token
    for e in range(EXPERTS):
        for token in range(tokens):
            wanted[2, 0, 4 * (token * EXPERTS + e)] = e, token
    assert threads.memory == wanted
    received = Counter((message, block) for message, block, _ in wanted)
    for (message, _), words in received.items():
        assert 4 * words == sizes.received[message]


def test_a_cluster_waits_for_the_rows_it_has(monkeypatch):
    """R = 75: four clusters of 16 rows, one of 11; and R = 64, eight of 8 rows."""
    armed = []
    monkeypatch.setattr(
        mosaic_norm_send.cluster_send, "arm", lambda _, counts: armed.append(counts)
    )
    for R, tokens in ((75, 16), (64, 8)):
        sizes = mosaic_norm_send.Sizes(R, 2048, tokens)
        for tile in range(sizes.tiles):
            messages = mosaic_norm_send.Messages(sizes, tile, 0, 0, barriers_smem=np.zeros(0))
            messages.begin()
    rows, products = zip(*armed, strict=True)
    assert [int(x) // 512 for x in rows] == [16] * 4 + [11] + [8] * 8
    assert products == (16 * 16 * 16 * 4,) * 5 + (16 * 16 * 8 * 4,) * 8


@pytest.mark.parametrize(("R", "tokens"), [(64, 8), (20, 8), (72, 16), (75, 16)])
def test_each_logit_is_stored_once(monkeypatch, R, tokens):
    """On a GPU; and no row that does not exist."""
    module = mosaic_norm
    sizes = mosaic_norm_send.Sizes(R, 2048, tokens)
    threads = Threads(monkeypatch)
    stored = {}

    def store_global(to, offset, x, where):
        if where is None or where:
            assert (to, offset) not in stored
            stored[to, offset] = x

    fakes = dict(
        elements=lambda totals: list(totals.registers.flat),
        thread=lambda: threads.thread,
        scalar=lambda x: x.registers.item(),
        plus=lambda x, y: x + y,
        times=lambda x, y: x * y,
        bit_and=lambda x, y: x & y,
        right=lambda x, y: x >> y,
        less=lambda x, y: x < y,
        global_address=lambda ref: "logits",
        store_global=store_global,
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(module.lanes, name, fake)
    monkeypatch.setattr(module.jnp, "int32", int)
    for tile in range(sizes.tiles):
        for block in range(8):

            def totals(thread, tile=tile, block=block):
                """Registers of [16, tokens], in order."""
                numbers = [divmod(thread * (tokens // 8) + i, tokens) for i in range(tokens // 8)]
                return [(16 * block + e, tile * tokens + token) for e, token in numbers]

            sender = mosaic_norm_send.Messages(sizes, tile, block, 0, barriers_smem=np.zeros(0))
            module.store_logits(sender, totals, np.zeros(0))
    assert stored == {
        ("logits", 4 * (r * EXPERTS + e)): (e, r) for r in range(R) for e in range(EXPERTS)
    }
