// RUN: secc opt %s -p 'allocate{cluster="1x8xH100" global-batch=16 refused="lm.pp"}' | filecheck %s

// 40 GB of parameters and 120 GB of gradients and states do not fit one device: without stages, four ranks share a replica's matrices.

// CHECK: OPTIMAL
sec.graph "lm" {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.pattern when [] share "1" {B = 1, S = 64}
  sec.block "lm" class "LM" params 10000000000 trainable 10000000000 layers 8 {tp = [2 : i64, 4 : i64]}
  // CHECK: sec.section "lm"
  // CHECK-SAME: dp = 2 : i64, tp = 4 : i64, pp = 1 : i64
  // CHECK-SAME: ranks = [0 : i64, 1 : i64, 2 : i64, 3 : i64, 4 : i64, 5 : i64, 6 : i64, 7 : i64]
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm : !sec.tensor<[B, S, 64], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
