// RUN: secc opt %s -p split-stages | filecheck %s
// RUN: secc opt %s -p split-stages,insert-transfers | filecheck %s --check-prefix EDGES

// The head is as heavy as two layers, so the last stage has fewer of them. Ranks are ordered (dp, pp, tp). A table that all layers take and
// that has no sample dim goes to each stage whole; glue that is cheap and needs it alone is computed again; the tied embedding is in both ends.

sec.graph "lm" widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 64}
  sec.block "embed" class "Embedding" params 4000 trainable 4000 component "" layers 4 when []
  sec.block "bias" class "Bias" params 64 trainable 64 component "" layers 4 when []
  sec.block "layers.0" class "Layer" params 4000 trainable 4000 component "" layers 4 when []
  sec.block "layers.1" class "Layer" params 4000 trainable 4000 component "" layers 4 when []
  sec.block "layers.2" class "Layer" params 4000 trainable 4000 component "" layers 4 when []
  sec.block "layers.3" class "Layer" params 4000 trainable 4000 component "" layers 4 when []
  sec.block "head" class "Linear" params 8000 trainable 8000 component "" layers 4 when []
  // CHECK: sec.section "lm_0" mode "train" when [] blocks ["embed", "bias", "layers.0", "layers.1", "layers.2"]
  // CHECK-SAME: ranks = [0 : i64, 1 : i64, 4 : i64, 5 : i64]
  // CHECK-SAME: pipeline = "lm", stage = 0 : i64
  // CHECK-SAME: in_flight = 4 : i64
  // CHECK-NEXT: sec.section "lm_1" mode "train" when [] blocks ["layers.3", "head"]
  // CHECK-SAME: ranks = [2 : i64, 3 : i64, 6 : i64, 7 : i64]
  // CHECK-SAME: stage = 1 : i64
  // CHECK-NOT: sec.section
  sec.section "lm" mode "train" when [] blocks ["embed", "bias", "layers.0", "layers.1", "layers.2", "layers.3", "head"] {dp = 2 : i64, pp = 2 : i64, tp = 2 : i64, ranks = [0 : i64, 1 : i64, 2 : i64, 3 : i64, 4 : i64, 5 : i64, 6 : i64, 7 : i64], micro_batch = 2 : i64, recompute = "none", sharding = "none"}
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %x = sec.call "embed" (%ids) args "$0" outs [""] in @lm {flops = "0"} : !sec.tensor<[B, S, 8], f32, grad>
    %t = sec.call "bias" () args "S" outs [""] in @lm {flops = "0"} : !sec.tensor<[1, 4, S, S], f32, grad>
    %u = sec.glue "aten.neg.default" (%t) args "$0" in @lm : !sec.tensor<[1, 4, S, S], f32, grad>
    // CHECK: sec.glue "aten.neg.default" {{.*}} in @lm_0
    // CHECK: sec.glue "aten.neg.default" {{.*}} in @lm_1
    // EDGES: sec.transfer "bias" (%{{.*}}) from @lm_0 to @lm_1 : !sec.tensor<[1, 4, S, S], f32, grad>
    // CHECK: sec.call "layers.0" {{.*}} in @lm_0
    %0 = sec.call "layers.0" (%x, %t) args "$0, $1" outs [""] in @lm {flops = "8000000000*B*S"} : !sec.tensor<[B, S, 8], f32, grad>
    %1 = sec.call "layers.1" (%0, %u) args "$0, $1" outs [""] in @lm {flops = "8000000000*B*S"} : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: sec.call "layers.2" {{.*}} in @lm_0
    // EDGES: sec.transfer "layers_2" (%{{.*}}) from @lm_0 to @lm_1 : !sec.tensor<[B, S, 8], f32, grad>
    %2 = sec.call "layers.2" (%1, %t) args "$0, $1" outs [""] in @lm {flops = "8000000000*B*S"} : !sec.tensor<[B, S, 8], f32, grad>
    // CHECK: sec.call "layers.3" {{.*}} in @lm_1
    %3 = sec.call "layers.3" (%2, %u) args "$0, $1" outs [""] in @lm {flops = "8000000000*B*S"} : !sec.tensor<[B, S, 8], f32, grad>
    %4 = sec.glue "aten.add.Tensor" (%3, %t) args "$0, $1" in @lm : !sec.tensor<[B, S, 8], f32, grad>
    %h = sec.call "head" (%4) args "$0" outs [""] in @lm {flops = "16000000000*B*S"} : !sec.tensor<[B, S, 500], f32, grad>
    // CHECK: sec.glue "aten.sum.default" {{.*}} in @lm_1
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
