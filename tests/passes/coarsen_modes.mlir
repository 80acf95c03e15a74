// RUN: secc opt %s -p coarsen | filecheck %s

// A small trained projector between a frozen tower and a frozen language model joins the one that owes a backward already: the
// tower stays free of it. A frozen section's mode is that of what it owes.

sec.graph "adapter" optional ["px"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.block "vision" class "V" params 30000 trainable 0 component "vision" layers 2 when ["px"]
  sec.block "projector" class "P" params 200 trainable 200 component "projector" layers 0 when ["px"]
  sec.block "lm" class "L" params 90000 trainable 0 component "lm" layers 4 when []
  // CHECK: sec.section "vision" mode "forward" when ["px"] blocks ["vision"]
  // CHECK-NEXT: sec.section "lm" mode "train" when [] blocks ["projector", "lm"]
  sec.case "image" when ["px"] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %px = sec.input "px" : !sec.tensor<[n, 3, 8, 8], f32>
    %f = sec.call "vision" (%px) args "$0" outs [""] {mode = "forward"} : !sec.tensor<[n, 4, 8], f32>
    %p = sec.call "projector" (%f) args "$0" outs [""] {mode = "train"} : !sec.tensor<[n, 4, 16], f32, grad>
    %h = sec.call "lm" (%ids, %p) args "$0, $1" outs [""] {mode = "dgrad"} : !sec.tensor<[B, S, 16], f32, grad>
    %n = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%n)
    sec.return constant "0.0"
  }
}
