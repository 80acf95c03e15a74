// RUN: secc opt %s -p 'shard-tensors' | filecheck %s

// With norms on parts of the sequence and cp, a layer keeps whole norms where the module around its products runs on rows by itself.

sec.graph "lm" optional [] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.block "tower" class "Tower" params 600 trainable 600
  sec.cut "tower.layers.0" block "tower" tp 2 styles [#sec.style<"tower.layers.0.mlp.up", "colwise">, #sec.style<"tower.layers.0.mlp.down", "rowwise">] shards [#sec.shard<"tower.layers.0.mlp.up.weight", 0, [8]>, #sec.shard<"tower.layers.0.mlp.down.weight", 1, [8]>] partial [] whole [] {positions = [#sec.style<"tower.layers.0", "sequence">, #sec.style<"tower.layers.0.mlp", "join">, #sec.style<"tower.layers.0.mlp.up", "columns">, #sec.style<"tower.layers.0.mlp.down", "scatter">], positions_partial = ["tower.layers.0.norm.weight"]}
  sec.cut "tower.layers.1" block "tower" tp 2 styles [#sec.style<"tower.layers.1.mlp.up", "colwise">, #sec.style<"tower.layers.1.mlp.down", "rowwise">] shards [#sec.shard<"tower.layers.1.mlp.up.weight", 0, [8]>, #sec.shard<"tower.layers.1.mlp.down.weight", 1, [8]>] partial [] whole [] {positions = [#sec.style<"tower.layers.1", "sequence">, #sec.style<"tower.layers.1.mlp", "join">, #sec.style<"tower.layers.1.mlp.up", "columns">, #sec.style<"tower.layers.1.mlp.down", "scatter">], positions_partial = ["tower.layers.1.norm.weight"]}
  // CHECK: sec.section "lm"
  // CHECK-SAME: styles = [#sec.style<"tower.layers.0", "sequence">, #sec.style<"tower.layers.0.mlp", "join">, #sec.style<"tower.layers.0.mlp.up", "columns">, #sec.style<"tower.layers.0.mlp.down", "scatter">, #sec.style<"tower.layers.1.mlp.up", "colwise">, #sec.style<"tower.layers.1.mlp.down", "rowwise">]
  // CHECK-SAME: partial = ["tower.layers.0.norm.weight"]
  // CHECK-SAME: whole = [#sec.unsplit<"tower.layers.1", "norms_whole_on_rows", "tower.layers.1.mlp", 0, 0>]
  sec.section "lm" mode "train" when [] blocks ["tower"] {tp = 2 : i64, cp = 2 : i64, norms = "sequence", row_layers = ["tower.layers.0", "tower.layers.1"], row_modules = ["tower.layers.0.norm", "tower.layers.1.mlp"]}
  sec.case "c" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, 4], i64>
    %h = sec.call "tower" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, 4, 8], f32, grad>
    %s = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%s) in @lm
    sec.return constant "0.0"
  }
}
