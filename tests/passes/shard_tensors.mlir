// RUN: secc opt %s -p 'shard-tensors' | filecheck %s

// A section takes the cuts of its blocks for its tp. A parameter that glue reads stays whole with the module it is in, and so does one that is
// tied to it, where an op needs it whole; a head and an embedding that are cut alike stay tied; what was cut for another tp is left out.

sec.graph "lm" optional [] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.block "embed" class "Embedding" params 128 trainable 128
  sec.block "tower" class "Tower" params 600 trainable 600
  sec.block "head" class "Linear" params 128 trainable 128
  sec.block "extra" class "Linear" params 64 trainable 64
  // CHECK-NOT: sec.cut
  sec.cut "tower.layers.0" block "tower" tp 2 styles [#sec.style<"tower.layers.0.attn", "shapes">, #sec.style<"tower.layers.0.attn.qkv", "colwise">, #sec.style<"tower.layers.0.attn.o", "rowwise">] shards [#sec.shard<"tower.layers.0.attn.qkv.weight", 0, [8, 8, 8]>, #sec.shard<"tower.layers.0.attn.o.weight", 1, [8]>] partial ["tower.layers.0.attn.q_norm"] whole [#sec.unsplit<"tower.layers.0.router", "mixes_entries", "softmax", 0, 0>]
  sec.cut "tower.layers.0" block "tower" tp 4 styles [#sec.style<"tower.layers.0.mlp.up", "colwise">] shards [#sec.shard<"tower.layers.0.mlp.up.weight", 0, [8]>] partial [] whole []
  sec.cut "embed" block "embed" tp 2 styles [#sec.style<"embed", "vocab">] shards [#sec.shard<"embed.weight", 0, [16]>] partial [] whole []
  sec.cut "head" block "head" tp 2 styles [#sec.style<"head", "gather">] shards [#sec.shard<"head.weight", 0, [16]>] partial [] whole []
  sec.cut "extra" block "extra" tp 2 styles [#sec.style<"extra", "gather">] shards [#sec.shard<"extra.weight", 0, [32]>] partial [] whole []
  sec.tie names ["embed.weight", "head.weight"]
  // CHECK: sec.section "lm"
  // CHECK-SAME: styles = [#sec.style<"tower.layers.0.attn", "shapes">, #sec.style<"tower.layers.0.attn.qkv", "colwise">, #sec.style<"tower.layers.0.attn.o", "rowwise">, #sec.style<"embed", "vocab">, #sec.style<"head", "gather">]
  // CHECK-SAME: shards = [#sec.shard<"tower.layers.0.attn.qkv.weight", 0, [8, 8, 8]>, #sec.shard<"tower.layers.0.attn.o.weight", 1, [8]>, #sec.shard<"embed.weight", 0, [16]>, #sec.shard<"head.weight", 0, [16]>]
  // CHECK-SAME: partial = ["tower.layers.0.attn.q_norm"]
  // CHECK-SAME: whole = [#sec.unsplit<"tower.layers.0.router", "mixes_entries", "softmax", 0, 0>, #sec.unsplit<"extra", "parameter_read_outside", "", 0, 0>, #sec.unsplit<"extra.weight", "read_by_glue", "", 0, 0>]
  sec.section "lm" mode "train" when [] blocks ["embed", "tower", "head", "extra"] {tp = 2 : i64}
  sec.case "c" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, 4], i64>
    %e = sec.call "embed" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, 4, 8], f32, grad>
    %h = sec.call "tower" (%e) args "$0" outs [""] in @lm : !sec.tensor<[B, 4, 8], f32, grad>
    %w = sec.param "extra.weight" : !sec.tensor<[32, 8], f32, grad>
    %c = sec.glue "aten.cumsum.default" (%w) args "$0, 0" in @lm : !sec.tensor<[32, 8], f32, grad>
    %l = sec.glue "aten.linear.default" (%h, %c) args "$0, $1" in @lm : !sec.tensor<[B, 4, 32], f32, grad>
    %s = sec.glue "aten.sum.default" (%l) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%s) in @lm
    sec.return constant "0.0"
  }
}
