// RUN: secc opt %s -p sink-boundaries | filecheck %s

// Pooling goes to the producer and expanding to the consumer, in all cases alike; glue that changes no size stays.

sec.graph "clip" optional ["px"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.pattern when ["px"] share "1" {B = 1, n = 1}
  sec.block "vision" class "V" params 300 trainable 300 component "vision" layers 2 when ["px"]
  sec.block "lm" class "L" params 900 trainable 900 component "lm" layers 4 when []
  // CHECK: sec.section "lm"
  // CHECK-SAME: notes = ["the boundary moved within glue: 3.2 kB -> 64 B per sample from vision to lm"]
  sec.section "vision" mode "train" when ["px"] blocks ["vision"]
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "image" when ["px"] {
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %px = sec.input "px" : !sec.tensor<[n, 64], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] in @vision {mode = "train"} : !sec.tensor<[n, 50, 8], f32, grad>
    // CHECK: sec.glue "aten.relu.default" {{.*}} in @vision
    %r = sec.glue "aten.relu.default" (%f) args "$0" in @vision : !sec.tensor<[n, 50, 8], f32, grad>
    // CHECK: sec.glue "aten.mean.dim" {{.*}} in @vision
    %m = sec.glue "aten.mean.dim" (%r) args "$0, [1]" in @lm : !sec.tensor<[n, 8], f32, grad>
    // CHECK: sec.glue "aten.neg.default" {{.*}} in @lm
    %o = sec.glue "aten.neg.default" (%m) args "$0" in @lm : !sec.tensor<[n, 8], f32, grad>
    // CHECK: sec.glue "aten.repeat.default" {{.*}} in @lm
    %e = sec.glue "aten.repeat.default" (%o) args "$0, [1, 20]" in @lm : !sec.tensor<[n, 160], f32, grad>
    %h = sec.call "lm" (%ids, %e) args "$0, $1" outs [""] in @lm {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
