"""A sound attention backend, and many with one fault each, as they are easily made."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from pageloom.contract import AttentionBackend


class Sound(AttentionBackend):
    """Attends sequence by sequence, over what it finds by the block table."""

    @classmethod
    def check(cls, spec):
        return None

    def bytes_per_block(self):
        return 2 * self.spec.block_size * sum(map(sum, map(self.widths, self.spec.layers)))

    def widths(self, layer):
        """Bytes of one token's K vectors, head by head."""
        if self.quantizer:
            size = self.quantizer.bytes_per_vector(layer.head_size)
        else:
            size = layer.head_size * self.spec.dtype.itemsize
        return [size] * layer.num_kv_heads

    def allocate(self, num_blocks):
        dtype = torch.uint8 if self.quantizer else self.spec.dtype
        self.cache = [
            torch.empty(
                (num_blocks, 2, self.spec.block_size, len(widths), widths[0] // dtype.itemsize),
                dtype=dtype,
            )
            for widths in map(self.widths, self.spec.layers)
        ]

    def plan(self, batch):
        self.batch = batch

    def forward(self, layer, q, k, v, out, sinks=None):
        self.store(layer, k, v)
        for i in range(self.batch.num_seqs):
            self.attend_one(layer, i, q, out, sinks)

    def store(self, layer, k, v, rows=slice(None)):
        slots = self.batch.slots[rows]
        blocks, offsets = slots // self.spec.block_size, slots % self.spec.block_size
        for i, (x, kind) in enumerate(((k, "k"), (v, "v"))):
            x = x[rows]
            coded = self.quantizer.encode(x, layer, kind) if self.quantizer else x
            self.cache[layer][blocks, i, offsets] = coded

    def attend_one(self, layer, i, q, out, sinks):
        start, end = self.batch.query_start_host[i : i + 2].tolist()
        length = self.length(int(self.batch.seq_lens_host[i]))
        k, v = self.load(layer, i, length)
        position = torch.arange(length - (end - start), length)
        out[start:end] = self.attend(layer, q[start:end], k, v, position, sinks)

    def length(self, length):
        return length

    def load(self, layer, i, length):
        at = torch.arange(length)
        blocks, offsets = self.find(i, at // self.spec.block_size), at % self.spec.block_size
        found = []
        for which, kind in enumerate("kv"):
            data = self.cache[layer][blocks, which, offsets]
            if self.quantizer:
                data = self.quantizer.decode(data, layer, kind, self.spec.dtype)
            found.append(data)
        return found

    def find(self, i, index):
        return self.batch.block_tables[i, index].long()

    def attend(self, layer, q, k, v, position, sinks):
        spec = self.spec.layers[layer]
        k, v = self.share(k.float(), spec), self.share(v.float(), spec)
        scores = self.softcap(q.float().transpose(0, 1) @ k.permute(1, 2, 0) * spec.scale, spec)
        age = position[:, None] - torch.arange(len(k))
        scores = scores.masked_fill((age < 0) | (age >= self.window(spec, len(k))), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        return (self.softmax(scores)[..., : len(k)] @ v.transpose(0, 1)).transpose(0, 1)

    def share(self, x, spec):
        return x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)

    def softcap(self, scores, spec):
        return spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap else scores

    def window(self, spec, length):
        return spec.window or length + 1

    def softmax(self, scores):
        return scores.softmax(-1)

    def copy_blocks(self, pairs):
        for cache in self.cache:
            for source, target in pairs:
                cache[target] = cache[source]

    def read_blocks(self, blocks):
        parts = [cache[list(blocks)].flatten(1) for cache in self.cache]
        return torch.cat(parts, 1).view(torch.uint8)

    def write_blocks(self, blocks, data):
        flat = data.clone().view(self.cache[0].dtype)
        parts = flat.split([cache[0].numel() for cache in self.cache], 1)
        for cache, part in zip(self.cache, parts, strict=True):
            cache[list(blocks)] = part.view(-1, *cache.shape[1:])


class MissesTheLastTokenOfAFullBlock(Sound):
    def length(self, length):
        return length - (length % self.spec.block_size == 0 and length > 1)


class SeesOneTokenTooMany(Sound):
    def attend(self, layer, q, k, v, position, sinks):
        return super().attend(layer, q, k, v, position + 1, sinks)


class ReadsUnwrittenSlots(Sound):
    # Whole blocks, and gives what lies behind the end no weight; but nothing times NaN is NaN.
    def load(self, layer, i, length):
        size = self.spec.block_size
        return super().load(layer, i, -(-length // size) * size)


class ReadsBlocksInOrder(Sound):
    def find(self, i, index):
        return self.batch.block_tables[i, 0] + index


class ForgetsWhatIsFarBack(Sound):
    def attend(self, layer, q, k, v, position, sinks):
        k[:-4096], v[:-4096] = 0, 0
        return super().attend(layer, q, k, v, position, sinks)


class IgnoresTheWindow(Sound):
    def window(self, spec, length):
        return length + 1


class WindowOneTooWide(Sound):
    def window(self, spec, length):
        return super().window(spec, length) + 1


class IgnoresTheSoftcap(Sound):
    def softcap(self, scores, spec):
        return scores


class IgnoresSinks(Sound):
    def attend(self, layer, q, k, v, position, sinks):
        return super().attend(layer, q, k, v, position, None)


class SharesTheWrongHeads(Sound):
    def share(self, x, spec):
        return x.repeat(1, spec.num_heads // spec.num_kv_heads, 1)


class SubtractsNoMaximum(Sound):
    def softmax(self, scores):
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True)


class ComputesInBfloat16(Sound):
    def softmax(self, scores):
        return super().softmax(scores.bfloat16()).float()


class AttendsBeforeAllIsStored(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        starts = self.batch.query_start_host.tolist()
        for i in range(self.batch.num_seqs):
            self.store(layer, k, v, slice(starts[i], starts[i + 1]))
            self.attend_one(layer, i, q, out, sinks)


class AssumesContiguousQueries(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        super().forward(layer, q, k, v, out, sinks)


class AssumesThatKLiesLikeV(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        room = k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()
        if (len(k) - 1) * v.stride(0) + v.stride(1) * v.shape[1] <= room:  # or it would crash
            k = k.as_strided(k.shape, v.stride())
        else:
            k = torch.zeros_like(k)
        super().forward(layer, q, k, v, out, sinks)


class ScalesQueriesInPlace(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        super().forward(layer, q, k, v, out, sinks)
        q.mul_(self.spec.layers[layer].scale)


class ChangesTheBatch(Sound):
    def plan(self, batch):
        super().plan(batch)
        batch.seq_lens.add_(1)


class WritesBesideOut(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        super().forward(layer, q, k, v, out, sinks)
        beside = out.as_strided(out.shape, out.stride(), out.storage_offset() + out[0].numel())
        beside[:, 0] = 0


class AddsToOut(Sound):
    def attend_one(self, layer, i, q, out, sinks):
        before = out.clone()
        super().attend_one(layer, i, q, out, sinks)
        out += before


class KeepsOneCacheForLikeLayers(Sound):
    def forward(self, layer, q, k, v, out, sinks=None):
        first = self.spec.layers.index(self.spec.layers[layer])
        super().forward(first, q, k, v, out, sinks)


class CopiesKOnly(Sound):
    def copy_blocks(self, pairs):
        for cache in self.cache:
            for source, target in pairs:
                cache[target, 0] = cache[source, 0]


class CopiesOneLayer(Sound):
    def copy_blocks(self, pairs):
        for source, target in pairs:
            self.cache[0][target] = self.cache[0][source]


class HandsOutItsCache(Sound):
    def read_blocks(self, blocks):
        if len(blocks) == 1 and len(self.cache) == 1:
            return self.cache[0][blocks[0]].view(1, -1).view(torch.uint8)
        return super().read_blocks(blocks)


class WritesBlocksInOrder(Sound):
    def write_blocks(self, blocks, data):
        super().write_blocks(sorted(blocks), data)


class CountsIn32Bits(Sound):
    def store(self, layer, k, v, rows=slice(None)):
        x = self.cache[layer]
        blocks = self.batch.slots // self.spec.block_size
        start = (blocks * x.stride(0)).int() % x.numel()  # of the block, in elements
        wrapped = start // x.stride(0) * self.spec.block_size
        slots = wrapped + self.batch.slots % self.spec.block_size
        self.batch = replace(self.batch, slots=slots)
        super().store(layer, k, v, rows)


class BelongsToOneThread(Sound):
    def allocate(self, num_blocks):
        super().allocate(num_blocks)
        self.local = threading.local()
        self.local.ready = True

    def plan(self, batch):
        assert self.local.ready
        super().plan(batch)


class AttendsToWhatItDidNotStore(Sound):
    # Of this step's own tokens it uses what it was given, not what is left of it in the cache.
    def forward(self, layer, q, k, v, out, sinks=None):
        self.given = k, v
        super().forward(layer, q, k, v, out, sinks)

    def load(self, layer, i, length):
        start, end = self.batch.query_start_host[i : i + 2].tolist()
        found = super().load(layer, i, length)
        for old, new in zip(found, self.given, strict=True):
            old[start - end :] = new[start:end]
        return found


class Rotates(Sound):
    fuses_rotary = True

    def forward(self, layer, q, k, v, out, sinks=None, rotary=None):
        if rotary is not None:
            q, k = self.turn_both(q, k, rotary)
        super().forward(layer, q, k, v, out, sinks)

    def turn_both(self, q, k, rotary):
        return self.turn(q, *rotary), self.turn(k, *rotary)

    def turn(self, x, cos, sin):
        turned = x.float() * cos.float()[:, None] + self.exchange(x).float() * sin.float()[:, None]
        return turned.to(x.dtype)

    def exchange(self, x):
        return x.roll(x.shape[-1] // 2, -1)


class RotatesTheOtherWay(Rotates):
    def turn(self, x, cos, sin):
        return super().turn(x, cos, -sin)


class RotatesNeighbours(Rotates):
    def exchange(self, x):
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


class RotatesKeysOnly(Rotates):
    def turn_both(self, q, k, rotary):
        return q, self.turn(k, *rotary)


class RotatesAllAsTheFirst(Rotates):
    def turn(self, x, cos, sin):
        return super().turn(x, cos[:1], sin[:1])


class RotatesUnasked(Rotates):
    def forward(self, layer, q, k, v, out, sinks=None, rotary=None):
        if rotary is None and layer:
            rotary = self.last
        self.last = rotary
        super().forward(layer, q, k, v, out, sinks, rotary)


class ChangesTheTables(Rotates):
    def forward(self, layer, q, k, v, out, sinks=None, rotary=None):
        super().forward(layer, q, k, v, out, sinks, rotary)
        if rotary is not None:
            rotary[1].neg_()


class RefusesWithoutReason(Sound):
    @classmethod
    def check(cls, spec):
        return False


class TakesAnotherBlockSize(Sound):
    @classmethod
    def block_size(cls, requested, max_model_len):
        return 16
