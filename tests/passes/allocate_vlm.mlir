// RUN: secc opt %s -p 'allocate{cluster="1x3xcpu" global-batch=16}' | filecheck %s

// Half of the samples have an image. Sharing all three ranks is fastest here: both sections are on all of them.

// CHECK: sec.graph "vlm"
// CHECK-SAME: world_size = 3 : i64, global_batch = 16 : i64
// CHECK-SAME: OPTIMAL
// CHECK-SAME: step_time_s
sec.graph "vlm" optional ["pixel_values"] {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.symbol "n" kind "rows" key "pixel_values" dim 0
  sec.pattern when [] share "0.5" {B = 1, S = 64, n = 0}
  sec.pattern when ["pixel_values"] share "0.5" {B = 1, S = 80, n = 1}
  sec.block "vision" class "Vision" params 600000 trainable 600000
  sec.block "lm" class "LM" params 1200000 trainable 1200000
  // CHECK: sec.section "vision"
  // CHECK-SAME: dp = 3 : i64, tp = 1 : i64, pp = 1 : i64, micro_batch = 3 : i64, ranks = [0 : i64, 1 : i64, 2 : i64]
  // CHECK-SAME: recompute = "none", sharding = "none"
  // CHECK-SAME: label = "default", forward_ns = "400000 + 1000*(19200000*n)//10000"
  sec.section "vision" mode "train" when ["pixel_values"] blocks ["vision"]
  // CHECK: sec.section "lm"
  // CHECK-SAME: dp = 3 : i64, tp = 1 : i64, pp = 1 : i64, micro_batch = 4 : i64, ranks = [0 : i64, 1 : i64, 2 : i64]
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, S, 64], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
  sec.case "image" when ["pixel_values"] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %px = sec.input "pixel_values" : !sec.tensor<[n, 3, 32, 32], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] in @vision : !sec.tensor<[n, 16, 64], f32, grad>
    %h = sec.call "lm" (%ids, %f) args "$0, $1" outs [""] in @lm : !sec.tensor<[B, S, 64], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
