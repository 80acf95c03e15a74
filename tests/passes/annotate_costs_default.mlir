// RUN: secc opt %s -p annotate-costs | filecheck %s

// Calls without measured costs: two FLOPs for each parameter and row, and the label says so.

sec.graph "lm" {
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.block "lm" class "LM" params 1000 trainable 0
  // CHECK: sec.section "lm"
  // CHECK-SAME: flops = "2000*B*S", backward_flops = "2000*B*S", saved = "512*B*S"
  // CHECK-SAME: cost = "default"
  sec.section "lm" mode "dgrad" when [] blocks ["lm"]
  sec.case "c" when [] {
    %x = sec.input "input_ids" : !sec.tensor<[B, S, 8], f32, grad>
    %h = sec.call "lm" (%x) args "$0" outs [""] in @lm : !sec.tensor<[B, S, 8], f32, grad>
    sec.return (%h)
  }
}
