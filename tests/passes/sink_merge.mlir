// RUN: secc opt %s -p sink-boundaries | filecheck %s

// The mean over the batch has no rows per sample, so no edge can carry it: the two sections become one, and the section between them.

sec.graph "centred" widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "first" class "F" params 10 trainable 10 component "first" layers 2 when []
  sec.block "middle" class "M" params 30 trainable 30 component "middle" layers 2 when []
  sec.block "last" class "L" params 20 trainable 20 component "last" layers 2 when []
  // CHECK: sec.section "middle" mode "train" when [] blocks ["first", "middle", "last"]
  // CHECK-SAME: notes = ["sections first and last are one: no boundary between them can be carried by rows per sample (the result [8] of first: no dim of [8] counts samples)"]
  // CHECK-NEXT: sec.case
  sec.section "first" mode "train" when [] blocks ["first"]
  sec.section "middle" mode "train" when [] blocks ["middle"]
  sec.section "last" mode "train" when [] blocks ["last"]
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    // CHECK: sec.call "first" {{.*}} in @middle
    %a, %c = sec.call "first" (%x) args "$0" outs ["[0]", "[1]"] in @first {mode = "train"} : !sec.tensor<[B, 8], f32, grad>, !sec.tensor<[8], f32, grad>
    %b = sec.call "middle" (%a) args "$0" outs [""] in @middle {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    // CHECK: sec.call "last" {{.*}} in @middle
    %d = sec.call "last" (%b, %c) args "$0, $1" outs [""] in @last {mode = "train"} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%d) args "$0" in @last : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @last
    sec.return constant "0.0"
  }
}
