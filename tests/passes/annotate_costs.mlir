// RUN: secc opt %s -p annotate-costs | filecheck %s

// A section's costs are those of its calls and glue; views are free, a case that another one contains does not count.

sec.graph "vlm" optional ["pixel_values"] {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.symbol "n" kind "rows" key "pixel_values" dim 0
  sec.block "vision" class "Vision" params 100 trainable 0
  sec.block "lm" class "LM" params 1000 trainable 1000 {bytes = 2000, trainable_bytes = 2000}

  // CHECK: sec.section "vision"
  // CHECK-SAME: flops = "500*n", backward_flops = "0", saved = "0", glue_bytes = "0", ops = 9 : i64
  // CHECK-SAME: params = 100 : i64, trainable = 0 : i64, param_bytes = 400 : i64
  // CHECK-SAME: cost = "counted", sent_bytes = "32*n"
  sec.section "vision" mode "forward" when ["pixel_values"] blocks ["vision"]
  // CHECK: sec.section "lm"
  // CHECK-SAME: flops = "40*B*S", backward_flops = "80*B*S", saved = "16*B*S + 36*n", glue_bytes = "4*B*S + 64*n + 4", ops = 9 : i64
  // CHECK-SAME: param_bytes = 2000 : i64, trainable_bytes = 2000 : i64, dtype = "bf16", cost = "counted", sent_bytes = "0"
  sec.section "lm" mode "train" when [] blocks ["lm"]

  sec.case "text" when [] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm {flops = "40*B*S", saved = "16*B*S", ops = 6, cost = "counted"} : !sec.tensor<[B, S, 2], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
  sec.case "image" when ["pixel_values"] {
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %px = sec.input "pixel_values" : !sec.tensor<[n, 3], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] no_grad in @vision {flops = "500*n", saved = "0", ops = 9, cost = "counted"} : !sec.tensor<[n, 8], f32>
    %v = sec.glue "aten.view.default" (%f) args "$0, [-1]" in @lm : !sec.tensor<["8*n"], f32>
    %g = sec.glue "aten.mul.Scalar" (%v) args "$0, 2" in @lm : !sec.tensor<["8*n"], f32>
    %h = sec.call "lm" (%ids, %g) args "$0, $1" outs [""] in @lm {flops = "40*B*S", saved = "16*B*S + 36*n", ops = 6, cost = "counted"} : !sec.tensor<[B, S, 2], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
