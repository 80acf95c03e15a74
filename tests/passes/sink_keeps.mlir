// RUN: secc opt %s -p 'sink-boundaries{cluster="1x2xcpu"}' | filecheck %s

// Features are larger than the images that they are made of, and the language model has room for the tower's weights. Still the tower stays where it
// is: a section is not emptied, since what shares ranks is for `allocate` to say. Its last block does move.

sec.graph "captions" optional ["images"] widths "own" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "images" dim 0
  sec.pattern when ["images"] share "1" {B = 1, n = 1}
  sec.block "tower" class "T" params 100 trainable 0 component "tower" when ["images"]
  sec.block "project" class "P" params 100 trainable 0 component "tower" when ["images"]
  sec.block "lm" class "L" params 9000 trainable 9000 component "lm" when []
  // CHECK: sec.section "tower" mode "forward" when ["images"] blocks ["tower"]
  // CHECK-NEXT: sec.section "lm" mode "train" when [] blocks ["lm", "project"]
  // CHECK-SAME: notes = ["project moved into lm: 2.56 kB -> 320 B per sample from tower to lm
  sec.section "tower" mode "forward" when ["images"] blocks ["tower", "project"]
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "images" when ["images"] {
    %ids = sec.input "ids" : !sec.tensor<[B, 4], i64>
    %px = sec.input "images" : !sec.tensor<[n, 4], f32>
    %f = sec.call "tower" (%px) args "$0" outs [""] no_grad in @tower {mode = "forward", flops = "400*n"} : !sec.tensor<[n, 80], f32>
    %g = sec.call "project" (%f) args "$0" outs [""] no_grad in @tower {mode = "forward", flops = "400*n"} : !sec.tensor<[n, 640], f32>
    %h = sec.call "lm" (%ids, %g) args "$0, $1" outs [""] in @lm {mode = "train", flops = "20000*B"} : !sec.tensor<[B, 8], f32, grad>
    %n = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%n) in @lm
    sec.return constant "0.0"
  }
}
