// RUN: secc opt %s -p 'coarsen{sections="eyes=vision+projector","words=lm"}' | filecheck %s --check-prefix=NAMED
// RUN: secc opt %s -p 'coarsen{max-sections=1}' | filecheck %s --check-prefix=ONE
// RUN: secc opt %s -p 'coarsen{by=block}' | filecheck %s --check-prefix=EACH

// The user's choices win over what the pass would do.

sec.graph "vlm" widths "own" {
  sec.symbol "B" kind "rows" key "px" dim 0
  sec.block "vision.0" class "V" params 30 trainable 0 component "vision" layers 2 when []
  sec.block "vision.1" class "V" params 30 trainable 0 component "vision" layers 2 when []
  sec.block "projector" class "P" params 40 trainable 40 component "projector" layers 0 when []
  sec.block "lm" class "L" params 90 trainable 90 component "lm" layers 4 when []
  // NAMED: sec.section "eyes" mode "train" when [] blocks ["vision.0", "vision.1", "projector"]
  // NAMED-NEXT: sec.section "words" mode "train" when [] blocks ["lm"]
  // NAMED-NEXT: sec.case
  // ONE: sec.section "lm" mode "train" when [] blocks ["vision.0", "vision.1", "projector", "lm"]
  // ONE-NEXT: sec.case
  // EACH: sec.section "vision_0" mode "forward"
  // EACH-NEXT: sec.section "vision_1" mode "forward"
  // EACH-NEXT: sec.section "projector" mode "train"
  // EACH-NEXT: sec.section "lm" mode "train"
  sec.case "all" when [] {
    %px = sec.input "px" : !sec.tensor<[B, 64], f32>
    %a = sec.call "vision.0" (%px) args "$0" outs [""] {mode = "forward"} : !sec.tensor<[B, 64], f32>
    %b = sec.call "vision.1" (%a) args "$0" outs [""] {mode = "forward"} : !sec.tensor<[B, 64], f32>
    %p = sec.call "projector" (%b) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, 16], f32, grad>
    %h = sec.call "lm" (%p) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, 16], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
