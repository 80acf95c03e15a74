// RUN: secc opt %s -p 'normalize-loss,annotate-patterns,infer-modes,coarsen' | filecheck %s

// A section is named after what is inside: `model` would be the frozen `target.model` or the whole model, which the others belong to.

sec.graph "eagle" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "target.model" class "Llama" params 4000 trainable 0 component "" layers 4
  sec.block "target.lm_head" class "Linear" params 300 trainable 0 component "" layers 0
  sec.block "draft" class "Draft" params 1100 trainable 1100 component "" layers 1
  // CHECK: sec.section "target_model" mode "forward" when [] blocks ["target.model"]
  // CHECK-NEXT: sec.section "draft" mode "train" when [] blocks ["target.lm_head", "draft"] {notes = ["target.lm_head joined draft: it has no stack of layers, 0.076 of the work"]}
  sec.case "all" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "target.model" (%ids) args "$0" outs [""] no_grad {work = "4000*B*S"} : !sec.tensor<[B, S, 32], f32>
    %d = sec.call "draft" (%h) args "$0" outs [""] {work = "1100*B*S"} : !sec.tensor<[B, S, 32], f32, grad>
    %y = sec.call "target.lm_head" (%d) args "$0" outs [""] {work = "300*B*S"} : !sec.tensor<[B, S, 96], f32, grad>
    %s = sec.glue "aten.sum.default" (%y) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%s)
  }
}
