// RUN: secc opt %s -p coarsen | filecheck %s

// Two components whose layers take turns depend on each other both ways, so they are one section. The critic that nobody calls has its
// parameters in the largest section.

sec.graph "interleaved" widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "critic" class "C" params 7 trainable 7 component "critic" layers 0 when []
  sec.block "trunk.0" class "T" params 30 trainable 30 component "trunk" layers 2 when []
  sec.block "trunk.1" class "T" params 30 trainable 30 component "trunk" layers 2 when []
  sec.block "cross.0" class "X" params 10 trainable 10 component "cross" layers 2 when []
  // CHECK: sec.section "trunk" mode "train" when [] blocks ["critic", "trunk.0", "trunk.1", "cross.0"]
  // CHECK-NEXT: sec.case
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %a = sec.call "trunk.0" (%x) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    %b = sec.call "cross.0" (%a) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    %c = sec.call "trunk.1" (%b) args "$0" outs [""] {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%c) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }
}
