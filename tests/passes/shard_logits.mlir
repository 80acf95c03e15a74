// RUN: secc opt %s -p 'shard-tensors,shard-logits' | filecheck %s

// A head's ranks have some tokens' logits each: sizes, softmaxes and labels' entries follow, what all ranks have enters or is cut, and an op
// that needs whole logits gets them gathered, which the section's `whole` says. A weight that glue alone reads is cut as well.

sec.graph "lm" optional [] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.block "tower" class "Tower" params 600 trainable 600
  sec.block "head" class "Linear" params 244 trainable 244
  sec.cut "tower.mlp" block "tower" tp 2 styles [#sec.style<"tower.mlp.up", "colwise">, #sec.style<"tower.mlp.down", "rowwise">] shards [#sec.shard<"tower.mlp.up.weight", 0, [8]>, #sec.shard<"tower.mlp.down.weight", 1, [8]>] partial [] whole []
  sec.cut "head" block "head" tp 2 styles [#sec.style<"head", "gather">] shards [#sec.shard<"head.weight", 0, [61]>] partial [] whole []
  // CHECK: sec.section "lm"
  // CHECK-SAME: styles = [#sec.style<"tower.mlp.up", "colwise">, #sec.style<"tower.mlp.down", "rowwise">, #sec.style<"head", "colwise">]
  // CHECK-SAME: shards = [#sec.shard<"tower.mlp.up.weight", 0, [8]>, #sec.shard<"tower.mlp.down.weight", 1, [8]>, #sec.shard<"head.weight", 0, [61]>, #sec.shard<"second.weight", 0, [61]>]
  // CHECK-SAME: whole = [#sec.unsplit<"head", "logits_gathered", "aten.sort.default (model.py:9)", 0, 0>, #sec.unsplit<"head", "logits_gathered", "section metrics", 0, 0>]
  sec.section "lm" mode "train" when [] blocks ["tower", "head"] {tp = 2 : i64}
  sec.section "metrics" mode "forward" when [] blocks []
  sec.case "c" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, 4], i64>
    %labels = sec.input "labels" : !sec.tensor<[B, 4], i64>
    %classes = sec.const "classes" : !sec.tensor<[61], f32>
    %t = sec.param "temperature" : !sec.tensor<[], f32, grad>
    %h = sec.call "tower" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, 4, 4], f32, grad>
    // CHECK: [[Z:%.+]] = sec.call "head"
    %z = sec.call "head" (%h) args "$0" outs [""] in @lm : !sec.tensor<[B, 4, 61], f32, grad>
    // CHECK-NEXT: [[WHOLE:%.+]] = sec.glue "parts.whole" ([[Z]]) args "$0, 2" in @lm {parts = 61 : i64} : !sec.tensor<[B, 4, 61], f32, grad>
    // CHECK-NEXT: [[T:%.+]] = sec.glue "parts.enter" (%t) args "$0" in @lm {parts = 61 : i64} : !sec.tensor<[], f32, grad>
    // CHECK-NEXT: [[D:%.+]] = sec.glue "aten.div.Tensor" ([[Z]], [[T]]) args "$0, $1" in @lm {parts = 61 : i64}
    %d = sec.glue "aten.div.Tensor" (%z, %t) args "$0, $1" in @lm : !sec.tensor<[B, 4, 61], f32, grad>
    // CHECK-NEXT: [[R:%.+]] = sec.glue "aten.view.default" ([[D]]) args "$0, [4*B, parts.length]" in @lm
    %r = sec.glue "aten.view.default" (%d) args "$0, [4*B, 61]" in @lm : !sec.tensor<["4*B", 61], f32, grad>
    // CHECK-NEXT: [[L:%.+]] = sec.glue "parts.log_softmax" ([[R]]) args "$0, 1, False" in @lm
    %l = sec.glue "aten._log_softmax.default" (%r) args "$0, 1, False" in @lm : !sec.tensor<["4*B", 61], f32, grad>
    // CHECK-NEXT: sec.glue "aten.view.default" (%labels)
    %y = sec.glue "aten.view.default" (%labels) args "$0, [4*B]" : !sec.tensor<["4*B"], i64>
    // CHECK-NEXT: [[C:%.+]] = sec.glue "parts.take" (%classes) args "$0, 0" in @lm {parts = 61 : i64} : !sec.tensor<[61], f32>
    // CHECK-NEXT: [[LOSS:%.+]], {{.*}} = sec.glue "parts.nll_loss" ([[L]], {{.*}}, [[C]]) args "$0, $1, $2, 2, -100" in @lm
    %loss, %n = sec.glue "aten.nll_loss_forward.default" (%l, %y, %classes) args "$0, $1, $2, 2, -100" in @lm : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    // CHECK: sec.glue "aten.sort.default" ([[WHOLE]])
    %o, %i = sec.glue "aten.sort.default" (%z) args "$0" in @lm at "model.py:9" : !sec.tensor<[B, 4, 61], f32, grad>, !sec.tensor<[B, 4, 61], i64>
    %first = sec.glue "aten.sum.default" (%o) args "$0" in @lm : !sec.tensor<[], f32, grad>
    // CHECK: sec.glue "aten.sum.default" ([[WHOLE]]) args "$0" in @metrics
    %seen = sec.glue "aten.sum.default" (%z) args "$0" in @metrics : !sec.tensor<[], f32, grad>
    %w = sec.param "second.weight" : !sec.tensor<[61, 4], f32, grad>
    // CHECK: [[H:%.+]] = sec.glue "parts.enter" (%h)
    // CHECK-NEXT: [[X:%.+]] = sec.glue "aten.linear.default" ([[H]], %w) args "$0, $1" in @lm {parts = 61 : i64}
    %x = sec.glue "aten.linear.default" (%h, %w) args "$0, $1" in @lm : !sec.tensor<[B, 4, 61], f32, grad>
    // CHECK-NEXT: [[S:%.+]] = sec.glue "aten.sum.default" ([[X]]) args "$0" in @lm {parts = 61 : i64}
    // CHECK-NEXT: sec.glue "parts.leave" ([[S]])
    %s = sec.glue "aten.sum.default" (%x) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%loss) in @lm
    sec.term "first" (%first) in @lm
    sec.term "seen" (%seen) in @metrics
    sec.term "sum" (%s) in @lm
    sec.return constant "0.0"
  }
}
